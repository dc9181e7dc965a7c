"""A transformers model over attnlib's paged caches: tokens of a batch in, logits out.

The model runs on one packed row `[1, T]` without a transformers cache or mask. The attention
function receives the step as the keyword `attnlib_step` and calls `attend`. Scheduling, sampling
and block tables belong to the caller: this is the interface between a model and an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from attnlib.backends.base import AttentionBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.continuous import paged_forward
from attnlib.integrations.transformers.latents import (
    LatentWeights,
    has_latents,
    make_latent_attention,
    unexpanded,
)
from attnlib.integrations.transformers.layers import layer_name
from attnlib.integrations.transformers.masks import read_mask
from attnlib.integrations.transformers.registration import NAME, register
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.latent_attention import LatentAttention
from attnlib.layer import Attention
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec, MaskKind
from attnlib.workspace import BatchLimits

__all__ = ["PagedModel", "PagedStep", "attend"]

_Group = tuple[type[AttentionBackend], AttentionSpec]
"""Layers of one group share a builder and the metadata of a step."""


class PagedModel:
    """A causal language model with one paged cache per layer.

    The attnlib layer, the cache and the builder of an attention module are created in its first
    call, because its sizes, window and sinks are not known before. Modules with multi-head latent
    attention cache latents where the backend supports it, and keys and values of every head
    elsewhere.

    Args:
        model: a transformers decoder with an attention interface, in evaluation mode.
        num_blocks: blocks in the cache of each layer.
        block_size: tokens in one block.
        backend: as in `get_attn_backend`; None selects by environment and priority.
        kv_cache_dtype: as in `AttentionSpec`.
        limits: the largest step. Workspaces are then allocated once, and a larger step is an error.
            None lets them grow.
        latents: cache latents (P10). None where a module has them and the backend supports it;
            True requires both, False never does.

    Raises:
        UnsupportedConfigError: `latents` is True and no module has latents that the backend
            supports, or the model uses the index of a token in the packed row as its
            position.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_blocks: int,
        block_size: int = 16,
        backend: str | type[AttentionBackend] | None = None,
        kv_cache_dtype: str = "auto",
        limits: BatchLimits | None = None,
        latents: bool | None = None,
    ) -> None:
        _refuse_model(model)
        self.model = model
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.backend = backend
        self.kv_cache_dtype = kv_cache_dtype
        self.limits = limits
        self._layers: dict[nn.Module, tuple[Attention, PagedKVCache]] = {}
        self._builders: dict[_Group, AttentionMetadataBuilder[Any]] = {}
        self._latent: dict[nn.Module, LatentAttention | None] = {}
        if latents is not False:
            self._latent = dict.fromkeys(filter(self._can_keep_latents, model.modules()))
        if latents and not self._latent:
            raise UnsupportedConfigError(
                f"{type(model).__name__}: no attention module has latents that "
                f"{backend or 'a backend'} supports; leave out latents=True"
            )

    @property
    def specs(self) -> Counter[AttentionSpec]:
        """Number of layers for each spec; empty before the first step."""
        return Counter(layer.spec for layer, _ in self._layers.values())

    @property
    def cache_bytes(self) -> int:
        """Total size of the caches in bytes."""
        return sum(
            c.num_slots
            * c.num_kv_heads
            * (c.head_size + (0 if c.values_alias_keys else c.head_size_v))
            * c.dtype.itemsize
            for _, c in self._layers.values()
        )

    def layers(self) -> list[tuple[Attention, PagedKVCache]]:
        """Layers and caches in the order of execution; empty before the first step."""
        return list(self._layers.values())

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which the attention of the model runs on attnlib; restored on exit."""
        register()
        model: Any = self.model
        before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        try:
            with unexpanded(self._latent):
                yield
        finally:
            model.set_attn_implementation(before)

    @torch.no_grad()
    def step(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        batch: CommonAttentionMetadata,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step within `attached()`; its keys and values are in the caches afterwards.

        Args:
            input_ids: `[T]` int64, the new tokens of all requests, packed.
            position_ids: `[T]` int64, the position of each token in its sequence.
            batch: lengths, block table and slots of the tokens.
            rows: `[n]` int64, the tokens whose logits are returned; None for all.

        Returns:
            `[n or T, vocabulary]` logits.

        Raises:
            UnsupportedConfigError: an attention layer did not receive the step.
        """
        model: Any = self.model
        selected = {} if rows is None else {"logits_to_keep": rows}
        step = PagedStep(self, batch)
        with paged_forward(self.model):
            out = model(
                input_ids=input_ids[None],
                position_ids=position_ids[None],
                use_cache=False,
                attnlib_step=step,
                **selected,
            )
        if not step.reached or step.reached != set(self._layers):
            raise UnsupportedConfigError(
                f"{type(self.model).__name__}: the step reached {len(step.reached)} of "
                f"{len(self._layers) or 'its'} attention layers, so the logits would be wrong: use "
                f"generate with attn_implementation='attnlib'"
            )
        logits: torch.Tensor = out.logits[0]
        return logits

    def layer_of(
        self, module: nn.Module, query: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> tuple[Attention, PagedKVCache]:
        """The attnlib layer and the cache of an attention module.

        Args:
            module: the attention module.
            query: `[1, Hq, T, D]`.
            value: `[1, Hkv, T, Dv]`.
            options: scaling, sliding_window, chunk, softcap and s_aux of the call.
        """
        found = self._layers.get(module)
        if found is None:
            found = self._layers[module] = self._create(module, query, value, options)
        return found

    def attend_latents(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        step: PagedStep,
        options: dict[str, Any],
    ) -> torch.Tensor | None:
        """Attention of a module over latents; None if the module does not keep them.

        Args:
            module: the attention module.
            query: `[1, Hq, T, P + rotary part]`.
            key: `[1, 1, T, R + rotary part]`, the latents.
            step: the step.
            options: as in `layer_of`.

        Returns:
            `[T, Hq, V]`.
        """
        if module not in self._latent:
            return None
        layer = self._latent[module]
        if layer is None:
            spec = LatentWeights(module).spec(**self._fields(options))
            layer = self._latent[module] = make_latent_attention(
                module, spec, **self._layer_options(module, query, options)
            )
            cache = PagedKVCache.allocate(spec, self.num_blocks, query.device)
            self._layers[module] = (layer.layer, cache)
        metadata, cache = step.metadata_for(layer.layer), self._layers[module][1]
        out: torch.Tensor = layer(query[0].transpose(0, 1), key[0, 0], cache, metadata)
        return out

    def _can_keep_latents(self, module: nn.Module) -> bool:
        """Whether a module has latents, and the backend supports a cache of them."""
        if not has_latents(module):
            return False
        spec = LatentWeights(module).spec(
            kv_cache_dtype=self.kv_cache_dtype, block_size=self.block_size
        )
        try:
            get_attn_backend(spec, self.backend, next(module.parameters()).device)
        except UnsupportedConfigError:
            return False
        return True

    def builder_of(self, layer: Attention) -> AttentionMetadataBuilder[Any]:
        """The metadata builder that all layers of one spec and backend share."""
        group = (layer.backend, layer.spec)
        if group not in self._builders:
            self._builders[group] = layer.backend.make_builder(
                layer.spec, next(self.model.parameters()).device, limits=self.limits
            )
        return self._builders[group]

    def _create(
        self, module: nn.Module, query: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> tuple[Attention, PagedKVCache]:
        spec = AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=value.shape[1],
            head_size=query.shape[3],
            head_size_v=value.shape[3],
            dtype=query.dtype,
            **self._fields(options),
        )
        layer = Attention(spec, **self._layer_options(module, query, options))
        return layer, PagedKVCache.allocate(spec, self.num_blocks, query.device)

    def _fields(self, options: dict[str, Any]) -> dict[str, Any]:
        """The fields of a spec that follow from the options of the call and of this model."""
        return {
            "kv_cache_dtype": self.kv_cache_dtype,
            "block_size": self.block_size,
            "mask_kind": MaskKind.CAUSAL,
            "sliding_window": options["sliding_window"],
            "attention_chunk_size": options["chunk"],
            "logits_soft_cap": options["softcap"],
            "has_sink": options["s_aux"] is not None,
        }

    def _layer_options(
        self, module: nn.Module, query: torch.Tensor, options: dict[str, Any]
    ) -> dict[str, Any]:
        """The keyword arguments of a layer."""
        return {
            "backend": self.backend,
            "scale": options["scaling"],
            "sinks": options["s_aux"],
            "prefix": layer_name(module),
            "device": query.device,
        }


class PagedStep:
    """One step of a `PagedModel`.

    Attributes:
        paged: the model.
        batch: the batch.
        reached: the attention modules that have attended in this step.
    """

    def __init__(self, paged: PagedModel, batch: CommonAttentionMetadata) -> None:
        self.paged = paged
        self.batch = batch
        self.reached: set[nn.Module] = set()
        self._metadata: dict[_Group, Any] = {}

    def metadata_for(self, layer: Attention) -> Any:
        """The metadata of this step for a layer; built once per group of layers."""
        group = (layer.backend, layer.spec)
        if group not in self._metadata:
            self._metadata[group] = self.paged.builder_of(layer).build(0, self.batch)
        return self._metadata[group]


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attnlib_step: PagedStep,
    *,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one module in a paged step, in the shapes of transformers.

    Args:
        module: the attention module.
        query: `[1, Hq, T, D]`, the packed new tokens.
        key: `[1, Hkv, T, D]`.
        value: `[1, Hkv, T, Dv]`.
        attnlib_step: the step that `PagedModel.step` passed to the model.
        attention_mask: the mask of transformers for the packed row. Only its window and chunk size
            are used: the step defines which tokens belong to a request.
        scaling, sliding_window, softcap, s_aux: arguments of the module.
        kwargs: further arguments; those that would change the result are refused.

    Returns:
        `[1, T, Hq, Dv]`, and None for the weights.

    Raises:
        UnsupportedConfigError: the layer is not causal, adds a position bias, or has a mask that no
            spec expresses.
    """
    _refuse_call(module, kwargs)
    window, chunk = _window_and_chunk(module, attention_mask)
    options = {
        "scaling": scaling,
        "sliding_window": sliding_window
        if window is None
        else min(window, sliding_window or window),
        "chunk": chunk,
        "softcap": softcap,
        "s_aux": kwargs.get("sinks") if s_aux is None else s_aux,
    }
    attnlib_step.reached.add(module)
    latent = attnlib_step.paged.attend_latents(module, query, key, attnlib_step, options)
    if latent is not None:
        return latent[None], None
    layer, cache = attnlib_step.paged.layer_of(module, query, value, options)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    out: torch.Tensor = layer(q, k, v, cache, attnlib_step.metadata_for(layer))
    return out[None], None


def _window_and_chunk(
    module: nn.Module, mask: torch.Tensor | None
) -> tuple[int | None, int | None]:
    """(sliding window, chunk size) of the mask, which some modules do not pass themselves."""
    if mask is None:
        return None, None
    step = read_mask(mask)
    if (
        not isinstance(step, StepMask)
        or step.pattern is None
        or not step.pattern.causal
        or step.pattern.spans is not None
        or step.attention_mask is not None
    ):
        raise UnsupportedConfigError(
            f"{layer_name(module)}: the mask of this step is not composed of causality, a "
            f"window and chunks (padding, images, or a mask of the caller's own): over its own "
            f"paged cache attnlib serves text only, without attention_mask; use generate with "
            f"attn_implementation='attnlib'"
        )
    left = step.pattern.window.left
    return None if left is None else left + 1, step.pattern.chunk


def _refuse_call(module: nn.Module, kwargs: dict[str, Any]) -> None:
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedConfigError(
            f"{layer_name(module)} is not causal: only decoders run in steps over a cache"
        )
    if kwargs.get("position_bias") is not None:
        raise UnsupportedConfigError(
            f"{layer_name(module)}: position_bias= covers the tokens of the packed row, but not "
            f"the keys in the cache; use generate with attn_implementation='attnlib'"
        )


def _refuse_model(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "attn_temperature_tuning", False):
        raise UnsupportedConfigError(
            f"{type(model).__name__} scales queries by their index in the row "
            f"(attn_temperature_tuning), which is not their position in a packed row: set it to "
            f"False if the model allows it, or use generate with attn_implementation='attnlib'"
        )
