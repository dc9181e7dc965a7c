"""SGLang's layers as attnlib's, over SGLang's pool."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import AttnlibError, UnsupportedConfigError
from attnlib.layer import Attention
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec, AttentionType, MaskKind, Window

__all__ = ["Layers", "check_keys"]

_DRAFT_BLOCK = "encoder_only"
"""SGLang's type of layers whose new tokens see each other and the cache: drafts in blocks."""


class Layers:
    """The attnlib layers of a model; each is made at its first call.

    Args:
        runner: SGLang's model runner.

    Attributes:
        has_latents: whether the pool holds latents (MLA).
    """

    def __init__(self, runner: Any) -> None:
        config, args = runner.model_config, runner.server_args
        self._dtype = runner.dtype
        self._device = torch.device(runner.device)
        self._pool = runner.token_to_kv_pool
        self._found: dict[Any, tuple[Attention, PagedKVCache | None]] = {}
        self._page_size = int(runner.page_size or 1)
        self._invariant = bool(getattr(args, "enable_deterministic_inference", False))
        self.has_latents = bool(getattr(runner, "use_mla_backend", False))
        self._rank = getattr(config, "kv_lora_rank", None)
        self._head_size = int(getattr(config, "head_dim", None) or 128)
        self._chunk = getattr(config, "attention_chunk_size", None)

    def needs_host_lengths(self) -> bool:
        """Whether the backend of most layers reads lengths on the host. SGLang asks before there
        are layers."""
        if self.has_latents:
            return True  # prefills without a prefix are not those of the cache
        spec = AttentionSpec(
            num_heads=1,
            head_size=self._head_size,
            dtype=self._dtype,
            block_size=self._page_size,
            batch_invariant=self._invariant,
        )
        try:
            backend = get_attn_backend(spec, None, self._device)
        except AttnlibError:
            return True
        return backend.get_builder_cls().needs_host_lengths

    def reads_the_pool(self, layer: Any) -> bool:
        """Whether keys are in the pool: not for prefills over keys and values of the heads of a
        model whose pool has latents."""
        return not self.has_latents or layer.v_head_dim == self._rank

    def find(
        self, layer: Any, sinks: torch.Tensor | None, *, trees: bool
    ) -> tuple[Attention, PagedKVCache | None]:
        """The attnlib layer of one of SGLang's layers, and its cache; None for a layer that does
        not read the pool. One layer of SGLang may have several: over latents and over keys of the
        heads, and with the mask of a tree. Arguments and errors as of `spec`.

        Args:
            sinks: `[Hq]`, one sink logit per head.
        """
        key = layer.layer_id, layer.qk_head_dim, layer.v_head_dim, trees
        if key not in self._found:
            keys, values = self._pool.get_kv_buffer(layer.layer_id)
            spec = self.spec(layer, keys.dtype, has_sink=sinks is not None, trees=trees)
            attention = Attention(spec, scale=layer.scaling, sinks=sinks, device=self._device)
            cache = self._view(layer, spec, keys, values) if spec.is_paged else None
            self._found[key] = (attention, cache)
        return self._found[key]

    def _view(
        self, layer: Any, spec: AttentionSpec, keys: torch.Tensor, values: torch.Tensor
    ) -> PagedKVCache:
        pages, scales = (-1, self._page_size), {}
        if spec.is_kv_quantized:
            scales = {"k_scale": layer.k_scale_float or 1.0, "v_scale": layer.v_scale_float or 1.0}
        keys = keys.view(*pages, *keys.shape[1:])
        values = (
            keys[..., : spec.head_size_v]
            if spec.use_mla
            else values.view(*pages, *values.shape[1:])
        )
        return PagedKVCache.from_views(keys, values, **scales)

    def fused_write_buffers(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The pool of a layer, `[slots, Hkv, D]`; None for latents and for pools with scales."""
        keys, values = self._pool.get_kv_buffer(layer.layer_id)
        return None if self.has_latents or keys.dtype.itemsize == 1 else (keys, values)

    def spec(self, layer: Any, cache_dtype: Any, *, has_sink: bool, trees: bool) -> AttentionSpec:
        """The spec of one of SGLang's layers.

        Args:
            layer: a `RadixAttention`.
            cache_dtype: dtype of the pool.
            has_sink: whether the layer has sinks.
            trees: whether the new tokens have a mask of their own.

        Raises:
            UnsupportedConfigError: cross-attention, a type of layer that attnlib does not know, or
                a window or chunks over a tree or a block.
        """
        kind, window = layer.attn_type.value, layer.sliding_window_size
        chunk = self._chunk if getattr(layer, "use_irope", False) else None
        windowed = (window is not None and window >= 0) or chunk is not None
        known = kind == "decoder" or (kind == _DRAFT_BLOCK and not windowed)
        if layer.is_cross_attention or not known:
            raise UnsupportedConfigError(
                f"layer {layer.layer_id} is cross-attention or of type {kind} (window {window}), "
                "which attnlib does not serve under SGLang: use another --attention-backend"
            )
        if trees and windowed:
            raise UnsupportedConfigError(
                f"layer {layer.layer_id} has a window or chunks, and tokens of a tree share "
                "positions: pass --speculative-eagle-topk 1"
            )
        mask = MaskKind.QUERY_BIAS if trees else MaskKind.CAUSAL
        if kind == _DRAFT_BLOCK:
            mask = MaskKind.BIDIRECTIONAL
        paged = self.reads_the_pool(layer)
        return AttentionSpec(
            num_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_size=layer.qk_head_dim,
            head_size_v=layer.v_head_dim,
            dtype=self._dtype,
            kv_cache_dtype=cache_dtype if paged else "auto",
            block_size=self._page_size,
            attn_type=AttentionType.DECODER if paged else AttentionType.ENCODER_ONLY,
            mask_kind=mask,
            use_mla=self.has_latents and paged,
            batch_invariant=self._invariant,
            # SGLang counts the keys before the query, without its own.
            window=Window(window, 0) if windowed and chunk is None else None,
            attention_chunk_size=chunk,
            logits_soft_cap=layer.logit_cap or None,
            has_sink=has_sink,
        )


def check_keys(layer: Any, spec: AttentionSpec, *, saved: bool, given: bool, batch: Any) -> None:
    """Refuse a call whose keys are not where its layer reads them.

    Args:
        layer: SGLang's.
        spec: of its attnlib layer.
        saved: whether the new keys are in the pool, or are written to it.
        given: whether there are new keys.
        batch: SGLang's.

    Raises:
        UnsupportedConfigError: an encoder, or keys of the heads with a prefix in the pool.
    """
    if spec.mask_kind is MaskKind.BIDIRECTIONAL and not saved:
        raise UnsupportedConfigError(
            f"layer {layer.layer_id} is an encoder, whose keys are not in the pool: use another "
            "--attention-backend"
        )
    if not spec.is_paged and (not given or any(batch.extend_prefix_lens_cpu or ())):
        raise UnsupportedConfigError(
            f"layer {layer.layer_id} attends to keys of the heads, and a request has a prefix in "
            "the pool: use another --attention-backend"
        )
