"""A transformers model over attnlib's own paged cache: the caller says which tokens of which request come next, and gets logits.

The model runs on one packed row `[1, T]` without a cache or a mask of its own; its attention function finds the step in the call's keywords and
attends here. Scheduling, sampling and block tables stay with the caller: this is the seam between a model and an engine.
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
from attnlib.integrations.transformers.layers import layer_name
from attnlib.integrations.transformers.masks import read_mask
from attnlib.integrations.transformers.registration import NAME, register
from attnlib.layer import Attention
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec, MaskKind
from attnlib.workspace import BatchLimits

__all__ = ["PagedModel", "PagedStep", "attend"]

_Group = tuple[type[AttentionBackend], AttentionSpec]
"""Layers that share a builder and a step's metadata."""


class PagedModel:
    """A causal language model whose attention reads and writes paged caches, one for each of its layers.

    Layers, caches and builders are made when a layer is first called: only then are its sizes, window and sinks known.

    Args:
        model: a transformers model with an attention interface (any recent decoder), on `device`, in eval mode.
        num_blocks: blocks in each layer's cache.
        block_size: tokens in one block.
        backend: as in `get_attn_backend`; None for selection by environment and priority.
        kv_cache_dtype: as in `AttentionSpec`.
        limits: the largest step that will come; workspaces are then allocated once, and a larger step is an error. None lets them grow.

    Raises:
        UnsupportedConfigError: the model computes something else than attention from where a token stands in the packed row.
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

    @property
    def specs(self) -> Counter[AttentionSpec]:
        """Spec -> how many layers have it; empty before the first step."""
        return Counter(layer.spec for layer, _ in self._layers.values())

    @property
    def cache_bytes(self) -> int:
        """Bytes that the caches of all layers take."""
        return sum(
            c.num_slots * c.num_kv_heads * (c.head_size + c.head_size_v) * c.dtype.itemsize
            for _, c in self._layers.values()
        )

    def layers(self) -> list[tuple[Attention, PagedKVCache]]:
        """Layers and their caches, in the order in which the model calls them; empty before the first step."""
        return list(self._layers.values())

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within the block, the model's attention goes through attnlib; afterwards it is as it was."""
        register()
        model: Any = self.model
        before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        try:
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
        """Run one step; the keys and values of its tokens are in the caches afterwards. Call it within `attached()`.

        Args:
            input_ids: `[T]` int64, the new tokens of all requests, packed.
            position_ids: `[T]` int64, the position of each in its own sequence.
            batch: lengths, block table and slots of the same tokens.
            rows: `[n]` int64, the tokens whose logits are wanted; None for all.

        Returns:
            `[n or T, vocabulary]` logits.
        """
        model: Any = self.model
        wanted = {} if rows is None else {"logits_to_keep": rows}
        out = model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            attnlib_step=PagedStep(self, batch),
            **wanted,
        )
        logits: torch.Tensor = out.logits[0]
        return logits

    def layer_of(
        self, module: nn.Module, query: torch.Tensor, value: torch.Tensor, meaning: dict[str, Any]
    ) -> tuple[Attention, PagedKVCache]:
        """The attnlib layer and cache of one of the model's attention modules."""
        found = self._layers.get(module)
        if found is None:
            found = self._layers[module] = self._make(module, query, value, meaning)
        return found

    def builder_of(self, layer: Attention) -> AttentionMetadataBuilder[Any]:
        """The builder that all layers of one spec on one backend share."""
        group = (layer.backend, layer.spec)
        if group not in self._builders:
            self._builders[group] = layer.backend.make_builder(
                layer.spec, next(self.model.parameters()).device, limits=self.limits
            )
        return self._builders[group]

    def _make(
        self, module: nn.Module, query: torch.Tensor, value: torch.Tensor, meaning: dict[str, Any]
    ) -> tuple[Attention, PagedKVCache]:
        name = layer_name(module)
        sinks = meaning["s_aux"]
        spec = AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=value.shape[1],
            head_size=query.shape[3],
            head_size_v=value.shape[3],
            dtype=query.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=self.block_size,
            mask_kind=MaskKind.CAUSAL,
            sliding_window=meaning["sliding_window"],
            attention_chunk_size=meaning["chunk"],
            logits_soft_cap=meaning["softcap"],
            has_sink=sinks is not None,
        )
        layer = Attention(
            spec,
            backend=self.backend,
            scale=meaning["scaling"],
            sinks=sinks,
            prefix=name,
            device=query.device,
        )
        return layer, PagedKVCache.allocate(spec, self.num_blocks, query.device)


class PagedStep:
    """One step of a `PagedModel`: the batch, and each spec's metadata, built once for all layers that share it."""

    def __init__(self, paged: PagedModel, batch: CommonAttentionMetadata) -> None:
        self.paged = paged
        self.batch = batch
        self._metadata: dict[_Group, Any] = {}

    def metadata_for(self, layer: Attention) -> Any:
        """The metadata of this step for a layer."""
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
    """Attention of one module in a paged step, in transformers' shapes.

    Args:
        module: the model's attention module.
        query: `[1, Hq, T, D]`, the packed new tokens; key and value likewise with Hkv heads.
        attnlib_step: the step, as `PagedModel.step` passed it.
        attention_mask: what transformers made for the packed row. Which tokens belong together is the step's to say; of the mask only windows and
            chunks are taken.
        scaling, sliding_window, softcap, s_aux: what the module passes of itself.
        kwargs: what else it passes on; anything that would change the result is refused.

    Returns:
        `[1, T, Hq, Dv]`, and None for the weights.

    Raises:
        UnsupportedConfigError: not causal, a bias per pair of tokens, or a mask that no spec can say.
    """
    _refuse_call(module, kwargs)
    window, chunk = _narrowing(module, attention_mask)
    meaning = {
        "scaling": scaling,
        "sliding_window": sliding_window
        if window is None
        else min(window, sliding_window or window),
        "chunk": chunk,
        "softcap": softcap,
        "s_aux": kwargs.get("sinks") if s_aux is None else s_aux,
    }
    layer, cache = attnlib_step.paged.layer_of(module, query, value, meaning)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    out: torch.Tensor = layer(q, k, v, cache, attnlib_step.metadata_for(layer))
    return out[None], None


def _narrowing(module: nn.Module, mask: torch.Tensor | None) -> tuple[int | None, int | None]:
    """(sliding window, chunk size) that the model's mask asks for: some modules do not know their own."""
    step = read_mask(mask)
    if mask is None:
        return None, None
    if (
        step is None
        or step.pattern is None
        or not step.pattern.causal
        or step.attention_mask is not None
    ):
        raise UnsupportedConfigError(
            f"{layer_name(module)}: the mask of this step is more than causal, a window and chunks (padding, images, or a mask of the caller's own): "
            f"over its own paged cache attnlib serves text only, without attention_mask; use generate with attn_implementation='attnlib'"
        )
    left = step.pattern.window.left
    return None if left is None else left + 1, step.pattern.chunk


def _refuse_call(module: nn.Module, kwargs: dict[str, Any]) -> None:
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedConfigError(
            f"{layer_name(module)} is not causal: only decoders run step by step over a cache"
        )
    if kwargs.get("position_bias") is not None:
        raise UnsupportedConfigError(
            f"{layer_name(module)}: position_bias= adds a number to every pair of tokens of the packed row, which does not reach keys in the cache; "
            f"use generate with attn_implementation='attnlib'"
        )


def _refuse_model(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "attn_temperature_tuning", False):
        raise UnsupportedConfigError(
            f"{type(model).__name__} scales queries by their place in the row (attn_temperature_tuning), and in a packed row that is not their "
            f"position: set it to False where the model allows, or use generate with attn_implementation='attnlib'"
        )
