"""`AttentionSpec`, the needs of a layer as a value."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnlib.kv_dtype import KVFormat, kv_cache_format, kv_cache_torch_dtype
from attnlib.kv_rotation import KVRotation
from attnlib.score_functions.function import ScoreFunction
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection
from attnlib.spec.checks import as_kind, as_window, check_spec
from attnlib.spec.kinds import AttentionType, CudaGraphSupport, MaskKind, Window
from attnlib.spec.layer_spec import LayerSpec

__all__ = ["AttentionSpec"]

_PAGED_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
_CAUSAL_MASKS = (MaskKind.CAUSAL, MaskKind.QUERY_BIAS)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(LayerSpec):
    """Everything about an attention layer that may decide its backend. Validated when created.

    Attributes:
        num_heads: query heads (Hq) of this rank.
        num_kv_heads: key and value heads (Hkv); divides `num_heads`. None means `num_heads`.
        head_size: elements of one query or key head (D).
        head_size_v: elements of one value head (Dv); None means `head_size`.
        dtype: dtype of q, k, v and the output.
        kv_cache_dtype: what the cache stores: a dtype, "auto" (= `dtype`), "fp8" (= "fp8_e4m3"),
            "fp8_e5m2", "float16", "bfloat16", "float32", or a format with scales in the page
            (M16): "int8_per_token_head", "fp8_per_token_head", "int4_per_group", "nvfp4", "mxfp4".
        value_cache_dtype: the same for values, where they are stored in another format
            (`kv_dtype.KV_FORMAT_PAIRS`); None for that of the keys.
        kv_scale_kind: granularity of the scales of a quantized cache, "tensor" or "head" (M9); not
            read for formats with scales in the page.
        kv_rotation: how heads are rotated before the cache stores them (P15): a `KVRotation`,
            "hadamard", "hadamard_keys", "hadamard_values", or None. The layer applies it.
        block_size: tokens per cache block (N).
        kv_cache_layout: required cache layout (P2); None means the layout that the backend prefers.
        attn_type: role of the layer in its model.
        mask_kind: keys that are visible before any window; None means causal for a decoder and
            bidirectional for all other types.
        sliding_window: number of visible keys, including the query's own (M2); None for all.
        window: the general form of `sliding_window`; give at most one of the two.
        attention_chunk_size: only keys in the query's own chunk of this many positions are visible
            (Llama 4); None for no chunks.
        logits_soft_cap: c in c * tanh(score / c); None for no soft cap.
        has_alibi: the layer has ALiBi slopes.
        has_sink: the layer has one sink logit per query head (M4).
        token_sinks: every call passes one sink logit per query token and head (M22).
        score_function: a function that changes scores before the mask is applied (M10); None for
            none.
        key_selection: the form of the lists of selected keys that every call passes (M11); None
            attends to all visible keys.
        compressed_entries: the form of a second key stream, whose entries every call passes and
            which is under one softmax with the layer's own keys (M17); None for none.
        allow_fp8_queries: over an e4m3 cache, prefills may round queries and weights to e4m3
            (M19).
        use_mla: multi-head latent attention: one latent KV head whose value is a prefix of its key
            (`value_cache` aliases `key_cache`, P10). Queries are absorbed (M12).
        needs_lse: the caller needs the log of the softmax denominator (M5).
        kv_sharing: the layer reads another layer's cache and never writes (P8).
        batch_invariant: the bits of a row must not depend on the other rows of the batch (M8).
        cudagraph: which batches must be capturable in a CUDA graph.

    Raises:
        ContractError: no attention layer can have this value; the message names the field, the
            value and the limit.
    """

    kind: ClassVar[str] = "attention"

    num_heads: int
    head_size: int
    dtype: torch.dtype
    num_kv_heads: int = None  # type: ignore[assignment]  # __post_init__ replaces None
    head_size_v: int = None  # type: ignore[assignment]  # as above
    kv_cache_dtype: str | torch.dtype = "auto"
    value_cache_dtype: str | torch.dtype | None = None
    kv_scale_kind: str = "tensor"
    kv_rotation: KVRotation | None = None
    block_size: int = 16
    kv_cache_layout: str | None = None
    attn_type: AttentionType = AttentionType.DECODER
    mask_kind: MaskKind = None  # type: ignore[assignment]  # as above
    sliding_window: int | None = None
    window: Window | None = None
    attention_chunk_size: int | None = None
    logits_soft_cap: float | None = None
    has_alibi: bool = False
    has_sink: bool = False
    token_sinks: bool = False
    score_function: ScoreFunction | None = None
    key_selection: KeySelection | None = None
    compressed_entries: CompressedEntries | None = None
    allow_fp8_queries: bool = False
    use_mla: bool = False
    needs_lse: bool = False
    kv_sharing: bool = False
    batch_invariant: bool = False
    cudagraph: CudaGraphSupport = CudaGraphSupport.NEVER

    def __post_init__(self) -> None:
        assign = object.__setattr__
        if self.num_kv_heads is None:
            assign(self, "num_kv_heads", self.num_heads)
        if self.head_size_v is None:
            assign(self, "head_size_v", self.head_size)
        assign(self, "attn_type", as_kind("attn_type", self.attn_type, AttentionType))
        if self.mask_kind is None:
            assign(self, "mask_kind", _default_mask(self.attn_type))
        assign(self, "mask_kind", as_kind("mask_kind", self.mask_kind, MaskKind))
        assign(self, "cudagraph", as_kind("cudagraph", self.cudagraph, CudaGraphSupport))
        assign(self, "window", as_window(self.window))
        assign(self, "kv_rotation", KVRotation.of(self.kv_rotation))
        check_spec(self)
        if self.value_format == self.kv_format:
            assign(self, "value_cache_dtype", None)
        self._freeze()

    __hash__ = LayerSpec.__hash__

    def _derived(self) -> dict[str, Any]:
        return {
            "num_kv_heads": self.num_heads,
            "head_size_v": self.head_size,
            "mask_kind": _default_mask(self.attn_type),
        }

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype in which the cache stores keys."""
        return kv_cache_torch_dtype(self.kv_cache_dtype, self.dtype)

    @property
    def kv_format(self) -> KVFormat:
        """How the cache stores the elements of a key head."""
        return kv_cache_format(self.kv_cache_dtype, self.dtype)

    @property
    def value_format(self) -> KVFormat:
        """How the cache stores the elements of a value head."""
        if self.value_cache_dtype is None:
            return self.kv_format
        return kv_cache_format(self.value_cache_dtype, self.dtype, "value_cache_dtype")

    @property
    def scales_in_page(self) -> bool:
        """Whether pages hold the scales of keys, of values or of both (M16)."""
        return self.kv_format.scales_in_page or self.value_format.scales_in_page

    @functools.cached_property
    def has_open_format(self) -> bool:
        """Whether keys or values have the format of a package (P16)."""
        return self.kv_format.is_open or self.value_format.is_open

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token of one layer, with scales in the page."""
        size_v = 0 if self.use_mla else self.value_format.bytes_per_head(self.head_size_v)
        return self.num_kv_heads * (self.kv_format.bytes_per_head(self.head_size) + size_v)

    @property
    def is_kv_quantized(self) -> bool:
        """True if the cache stores elements of 8 bits or less, with scales."""
        return 1 in (self.kv_dtype.itemsize, self.value_format.dtype.itemsize)

    @property
    def is_causal(self) -> bool:
        """True if every request is causal."""
        return self.mask_kind in _CAUSAL_MASKS

    @property
    def is_paged(self) -> bool:
        """True if keys and values are in the paged cache; encoder self-attention has no cache."""
        return self.attn_type in _PAGED_TYPES

    @functools.cached_property
    def has_query_tensors(self) -> bool:
        """True if every call passes tensors of its query tokens (M21, M22)."""
        function = self.score_function
        return self.token_sinks or (function is not None and bool(function.query_tensors))

    @functools.cached_property
    def takes_extra(self) -> bool:
        """True if every call passes more than its queries, keys and values."""
        selects = self.key_selection is not None or self.compressed_entries is not None
        return selects or self.has_query_tensors

    @property
    def visible_window(self) -> Window:
        """`window`, or `sliding_window` in the general form (M2).

        A sliding window W makes keys [p-W+1, p] visible to a query at position p; in a layer that
        is not causal, keys k with |p-k| < W.
        """
        if self.window is not None:
            return self.window
        if self.sliding_window is None:
            return Window()
        return Window(self.sliding_window - 1, 0 if self.is_causal else self.sliding_window - 1)


def _default_mask(attn_type: AttentionType) -> MaskKind:
    """The mask of a layer whose spec names none."""
    decoder = attn_type is AttentionType.DECODER
    return MaskKind.CAUSAL if decoder else MaskKind.BIDIRECTIONAL
