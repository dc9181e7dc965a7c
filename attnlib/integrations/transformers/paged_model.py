"""A transformers model over attnlib's paged caches: tokens of a batch in, logits out.

The model runs on one packed row `[1, T]` without a transformers cache or mask. The attention
function receives the step as the keyword `attnlib_step` and calls `attend`. Scheduling, sampling
and block tables belong to the caller: this is the interface between a model and an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from attnlib.backends.base import AttentionBackend
from attnlib.cache.hybrid import Group, HybridKVCache
from attnlib.cache.storage import PagedKVCache
from attnlib.integrations.transformers.decode_graphs import DecodeGraphs
from attnlib.integrations.transformers.discovery import create_layers, discover
from attnlib.integrations.transformers.experts import sized_experts
from attnlib.integrations.transformers.latents import unexpanded
from attnlib.integrations.transformers.mixer_layers import MixerLayers
from attnlib.integrations.transformers.paged_batches import StepBatch, check_tokens, one_batch
from attnlib.integrations.transformers.paged_forward import run_step
from attnlib.integrations.transformers.paged_latents import LatentLayers
from attnlib.integrations.transformers.paged_layers import PagedLayers
from attnlib.integrations.transformers.paged_refusals import (
    check_model,
    refuse_model,
    shares_keys,
)
from attnlib.integrations.transformers.paged_step import PagedStep, attend
from attnlib.integrations.transformers.registration import NAME, register
from attnlib.integrations.transformers.shared_layers import shared_suffix
from attnlib.integrations.transformers.state_mixers import StateMixers
from attnlib.integrations.transformers.token_terms import by_distance
from attnlib.kv_rotation import KVRotation
from attnlib.layer import Attention
from attnlib.layer.state import StateLayer
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = ["PagedModel", "PagedStep", "attend"]


class PagedModel:
    """A causal language model with one paged cache per layer.

    The attnlib layer, the cache and the builder of an attention module are created in its first
    call, because its sizes, window and sinks are not known before. Modules with multi-head latent
    attention cache latents where the backend supports it, and keys and values of every head
    elsewhere.

    Layers that attend to the keys of earlier layers (Gemma 3n, Gemma 4) have no cache (P8). The
    last of these are computed only for the tokens whose logits are returned.

    Args:
        model: a transformers decoder with an attention interface, in evaluation mode.
        num_blocks: blocks in the cache of each layer; of the one pool, if `hybrid`.
        block_size: tokens in one block; the least of all groups, if `hybrid`.
        backend: as in `get_attn_backend`; None selects by environment and priority.
        kv_cache_dtype, value_cache_dtype, kv_rotation: as in `AttentionSpec`.
        limits: the largest step, for workspaces that are allocated once; None lets them grow.
        latents: cache latents (P10). None where a module has them and the backend supports it;
            True requires both, False never does.
        hybrid: one pool of blocks for all layers, in which windowed layers keep their window only,
            and states are blocks (T15): `groups` describes it, a `HybridBlockAllocator` assigns its
            blocks, and each group of a step has a batch of its own.
        num_slots: without a pool, requests whose recurrent states are held at once. Batches of
            models with state layers name the slot of each request (`state_slots`).
        max_rollback: tokens of the last step that the next one may take back (T10).
        cuda_graphs: decodes on a GPU run in CUDA graphs, which read the weights where they are; the
            code of the model, and hooks, run in a capture only. Needs `limits`, and backends that
            can be captured.

    Attributes:
        attention: the layers, caches and builders of its attention modules.
        latents, states: the modules that cache latents; the mixers of state layers.
        graphs: those of decodes, or None.
        shares, shared_layers: whether layers read the keys of earlier ones, and the last of these.

    Raises:
        UnsupportedConfigError: `latents` is True and no module has latents that the backend
            supports, or the model uses the index of a token in the packed row as its position, or
            has layers with an indexer, compressed entries, or states of models that
            `state_mixers.SERVED` has not.
        ContractError: no module, or a number of blocks or a block size below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_blocks: int,
        block_size: int = 16,
        backend: str | type[AttentionBackend] | None = None,
        kv_cache_dtype: str = "auto",
        value_cache_dtype: str | None = None,
        kv_rotation: KVRotation | str | None = None,
        limits: BatchLimits | None = None,
        latents: bool | None = None,
        hybrid: bool = False,
        num_slots: int = 16,
        max_rollback: int = 0,
        cuda_graphs: bool = False,
    ) -> None:
        check_model(model)
        self.states = StateMixers(model, MixerLayers(num_slots, max_rollback, backend, hybrid))
        refuse_model(model, serves_states=bool(self.states.modules))
        self.model = model
        self.num_blocks, self.block_size = num_blocks, block_size
        formats = (kv_cache_dtype, value_cache_dtype, kv_rotation)
        self.attention = PagedLayers(num_blocks, block_size, backend, formats, limits)
        self.hybrid = hybrid
        self.shared_layers: list[nn.Module] = []
        # The lazy creation of layers knows neither groups nor who shares keys.
        self.shares = any(map(shares_keys, model.modules()))
        self._is_prepared = not hybrid and not self.shares
        self.latents = LatentLayers(self, model.modules(), latents)
        self.graphs = DecodeGraphs(self, limits) if cuda_graphs else None

    @property
    def pool(self) -> HybridKVCache | None:
        """The pool of a hybrid model; None before `prepare`, and for other models."""
        return self.attention.pool

    @property
    def specs(self) -> Counter[AttentionSpec]:
        """Number of layers for each spec; empty before the first step."""
        return self.attention.specs

    @property
    def cache_bytes(self) -> int:
        """Total size of the caches and slots in bytes; a shared cache counts once."""
        return self.attention.cache_bytes + self.states.layers.cache_bytes

    @property
    def expanded_cache_bytes(self) -> int:
        """`cache_bytes` with `latents=False`: keys and values of every head in place of latents."""
        return self.attention.expanded_bytes(self.latents.modules)

    def layers(self) -> list[tuple[Attention, PagedKVCache]]:
        """Layers and caches in the order of execution; empty before the first step."""
        return list(self.attention.by_module.values())

    def all_layers(self) -> list[Attention | StateLayer]:
        """Attention layers, then state layers; empty before the first step."""
        states = self.states.layers.by_part.values()
        return [*(layer for layer, _ in self.layers()), *(one.layer for one in states)]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which the attention of the model runs on attnlib; restored on exit."""
        register()
        model: Any = self.model
        before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        try:
            with (
                unexpanded(self.latents.modules),
                self.states.attached(),
                by_distance(model),
                sized_experts(model),
            ):
                yield
        finally:
            model.set_attn_implementation(before)

    @property
    def is_attached(self) -> bool:
        """Whether steps may run: within `attached`."""
        config: Any = self.model.config
        return bool(config._attn_implementation == NAME)

    @property
    def groups(self) -> Mapping[str, Group]:
        """The groups of a hybrid model by name: "full", "window 128", "states" and the like. For a
        `HybridBlockAllocator`; empty for other models.

        Raises:
            UnsupportedConfigError: as `prepare`.
        """
        self.prepare()
        return {} if self.pool is None else self.pool.groups

    def prepare(self) -> None:
        """Find the layers of a hybrid model, or of one whose layers share keys, by a forward of one
        token without attention, and create their caches. The first step does it otherwise.

        Raises:
            UnsupportedConfigError: an attention layer did not receive the step, or its attention is
                not supported.
        """
        if self._is_prepared:
            return
        found, layers = discover(self), self.attention
        layers.by_module, layers.groups, layers.pool = create_layers(self, found)
        shared = {one.module for one in found if one.producer is not None}
        self.shared_layers = shared_suffix(self.model, [one.module for one in found], shared)
        self._is_prepared = True

    @torch.no_grad()
    def step(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        batch: StepBatch,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step within `attached()`; its keys and values are in the caches afterwards.

        Args:
            input_ids: `[T]` int64, the new tokens of all requests, packed.
            position_ids: `[T]` int64, the position of each token in its sequence.
            batch: lengths, block table and slots of the tokens; for a hybrid model those that
                `group_batches` makes, one per group.
                With `query_bias`, new tokens are trees (M20), whose batches may need `tree`.
            rows: `[n]` int64, the tokens whose logits are returned; None for all. On the CPU, a
                model whose last layers share keys reads them without a synchronization.

        Returns:
            `[n or T, vocabulary]` logits.

        Raises:
            UnsupportedConfigError: an attention layer did not receive the step.
            ContractError: a hybrid model and a single batch, a group without a batch, or tensors
                that are not those of the batch (`check_tokens`).
        """
        self.prepare()
        one = one_batch(batch, self.groups if self.hybrid else None)
        check_tokens(one, input_ids, position_ids, rows)
        if self.graphs is not None:
            logits = self.graphs.logits(input_ids, position_ids, batch, one)
            if logits is not None:
                return logits if rows is None else logits[rows.to(logits.device)]
        return run_step(self, input_ids, position_ids, batch, one, rows)

    def builder_of(self, layer: Attention) -> AttentionMetadataBuilder[Any]:
        """The metadata builder that all layers of one spec and backend share."""
        return self.attention.builder_of(layer, next(self.model.parameters()).device)
