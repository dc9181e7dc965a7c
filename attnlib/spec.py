"""What an attention layer needs from a backend.

`AttentionSpec` contains everything that may decide whether a backend supports a layer, and nothing
else: `capabilities.py` has exactly one check for each field. Values that do not affect the choice
(the softmax scale, the values of slopes and sinks) are parameters of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import torch

from attnlib.compressed_entries import CompressedEntries
from attnlib.errors import ContractError
from attnlib.key_selection import KeySelection
from attnlib.kv_dtype import KVFormat, kv_cache_format, kv_cache_torch_dtype
from attnlib.score_functions.function import ScoreFunction
from attnlib.sizes import MAX_LOGITS_SOFT_CAP

__all__ = ["AttentionSpec", "AttentionType", "CudaGraphSupport", "MaskKind", "Window"]


class AttentionType(str, Enum):
    """Role of a layer in its model. Members are strings because torch.compile can trace these."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class MaskKind(str, Enum):
    """The keys that are visible before any window is applied."""

    CAUSAL = "causal"
    BIDIRECTIONAL = "bidirectional"
    PER_REQUEST = "per_request"
    """One flag per request: `CommonAttentionMetadata.causal` is a bool tensor."""
    QUERY_BIAS = "query_bias"
    """Causal, plus an additive bias among the new tokens (`CommonAttentionMetadata.query_bias`),
    for example the mask of a speculation tree."""


_PAGED_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
_CAUSAL_MASKS = (MaskKind.CAUSAL, MaskKind.QUERY_BIAS)


class CudaGraphSupport(IntEnum):
    """Batches that a CUDA graph can capture. A model supports the minimum over its layers."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class Window(NamedTuple):
    """Visible keys around the query's own position (M2).

    Attributes:
        left: number of visible keys before it; None for all, 0 for none.
        right: number of visible keys after it; None for all, 0 for none.
    """

    left: int | None = None
    right: int | None = None

    @property
    def is_full(self) -> bool:
        """True if neither side is bounded."""
        return self.left is None and self.right is None

    def as_kernel_args(self) -> tuple[int, int]:
        """(left, right) for the kernels, with -1 for an unbounded side."""
        return (-1 if self.left is None else self.left, -1 if self.right is None else self.right)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
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
        kv_scale_kind: granularity of the scales of a quantized cache, "tensor" or "head" (M9); not
            read for formats with scales in the page.
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
        score_function: a function that changes scores before the mask is applied (M10); None for
            none.
        key_selection: the form of the lists of selected keys that every call passes (M11); None
            attends to all visible keys.
        compressed_entries: the form of a second key stream, whose entries every call passes and
            which is under one softmax with the layer's own keys (M17); None for none.
        skip_softmax_threshold: weight, relative to the largest weight of its row, below which a
            backend may leave out keys (M18); None leaves none out.
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

    num_heads: int
    head_size: int
    dtype: torch.dtype
    num_kv_heads: int = None  # type: ignore[assignment]  # __post_init__ replaces None
    head_size_v: int = None  # type: ignore[assignment]  # as above
    kv_cache_dtype: str | torch.dtype = "auto"
    kv_scale_kind: str = "tensor"
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
    score_function: ScoreFunction | None = None
    key_selection: KeySelection | None = None
    compressed_entries: CompressedEntries | None = None
    skip_softmax_threshold: float | None = None
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
        assign(self, "attn_type", AttentionType(self.attn_type))
        if self.mask_kind is None:
            decoder = self.attn_type is AttentionType.DECODER
            assign(self, "mask_kind", MaskKind.CAUSAL if decoder else MaskKind.BIDIRECTIONAL)
        assign(self, "mask_kind", MaskKind(self.mask_kind))
        assign(self, "cudagraph", CudaGraphSupport(self.cudagraph))
        if self.window is not None:
            assign(self, "window", Window(*self.window))
        self._check_sizes()
        self._check_mask()
        self._check_dtypes()
        self._check_score_function()
        self._check_key_selection()
        self._check_compressed_entries()
        assign(self, "_hash", hash(tuple(getattr(self, field.name) for field in fields(self))))

    def __hash__(self) -> int:
        # The spec is part of the key of the selection cache, and hashing all fields is slow.
        return self._hash  # type: ignore[attr-defined, no-any-return]  # set in __post_init__

    def __reduce__(self) -> tuple[Any, ...]:
        # String hashes differ between processes, so the hash must not be pickled.
        return _rebuild, ({field.name: getattr(self, field.name) for field in fields(self)},)

    def _check_sizes(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_size", "head_size_v", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ContractError(f"{name}={value!r} must be an integer of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ContractError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}: all KV heads must have the same number of "
                f"query heads"
            )
        if self.use_mla and (self.num_kv_heads != 1 or self.head_size_v > self.head_size):
            raise ContractError(
                f"use_mla needs num_kv_heads=1 and head_size_v <= head_size (the value is a prefix "
                f"of the key), got num_kv_heads={self.num_kv_heads}, "
                f"head_size_v={self.head_size_v}, head_size={self.head_size}"
            )

    def _check_mask(self) -> None:
        if self.sliding_window is not None and self.window is not None:
            raise ContractError(
                f"sliding_window={self.sliding_window} and window={tuple(self.window)} are both "
                f"given: give one of them"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ContractError(
                f"sliding_window={self.sliding_window} must be at least 1 (1 means the query's own "
                f"key only); None for no window",
                rule="M2",
            )
        for side, value in zip(("left", "right"), self.window or (), strict=False):
            if value is not None and value < 0:
                raise ContractError(
                    f"window {side}={value} must not be negative; 0 means no key on this side, "
                    f"None means all",
                    rule="M2",
                )
        if self.attention_chunk_size is not None and self.attention_chunk_size < 1:
            raise ContractError(
                f"attention_chunk_size={self.attention_chunk_size} must be at least 1, or None for "
                f"no chunks"
            )
        if self.logits_soft_cap is not None and not 0 < self.logits_soft_cap <= MAX_LOGITS_SOFT_CAP:
            raise ContractError(
                f"logits_soft_cap={self.logits_soft_cap} must be above 0 and at most "
                f"{MAX_LOGITS_SOFT_CAP:.0f}, or None for no soft cap",
                rule="M3",
            )

        self._check_skip_softmax()
        self._check_fp8_queries()

    def _check_fp8_queries(self) -> None:
        if not self.allow_fp8_queries:
            return
        if self.kv_dtype != torch.float8_e4m3fn or self.kv_format.scales_in_page:
            raise ContractError(
                f"allow_fp8_queries=True with kv_cache_dtype={self.kv_cache_dtype}: queries are "
                "rounded to the elements of an e4m3 cache; use kv_cache_dtype='fp8_e4m3', or leave "
                "it False",
                rule="M19",
            )
        if self.batch_invariant:
            raise ContractError(
                "allow_fp8_queries=True with batch_invariant=True: decodes do not round queries, "
                "so the bits of a row would depend on the batch; drop one of them",
                rule="M19",
            )

    def _check_skip_softmax(self) -> None:
        threshold = self.skip_softmax_threshold
        if threshold is None:
            return
        if not 0 < threshold < 1:
            raise ContractError(
                f"skip_softmax_threshold={threshold} must be above 0 and below 1 (a weight "
                "relative to the largest one of its row), or None to leave no key out",
                rule="M18",
            )
        if self.batch_invariant:
            raise ContractError(
                f"skip_softmax_threshold={threshold} with batch_invariant=True: the rows of a tile "
                "decide together which keys are left out, so a row would depend on other rows; "
                "drop one of them",
                rule="M18",
            )

    def _check_dtypes(self) -> None:
        if (
            not isinstance(self.dtype, torch.dtype)
            or not self.dtype.is_floating_point
            or self.dtype.itemsize < 2
        ):
            raise ContractError(
                f"dtype={self.dtype!r} must be a floating-point torch dtype of at least 16 bits, "
                f"such as torch.bfloat16"
            )
        stored = kv_cache_format(self.kv_cache_dtype, self.dtype)
        for name in ("head_size", "head_size_v"):
            if getattr(self, name) % stored.head_size_multiple:
                raise ContractError(
                    f"{name}={getattr(self, name)} must be a multiple of "
                    f"{stored.head_size_multiple} for kv_cache_dtype={stored.name}",
                    rule="M16",
                )
        if stored.scales_in_page and self.use_mla:
            raise ContractError(
                f"kv_cache_dtype={stored.name} stores keys and values separately, and use_mla "
                "stores them once: use fp8, or the dtype of the model",
                rule="M16",
            )
        if self.kv_scale_kind not in ("tensor", "head"):
            raise ContractError(
                f"kv_scale_kind={self.kv_scale_kind!r} must be 'tensor' or 'head'", rule="M9"
            )

    def _check_score_function(self) -> None:
        function = self.score_function
        if function is not None and not isinstance(function, ScoreFunction):
            raise ContractError(
                f"score_function={function!r} is a {type(function).__name__}; wrap the function: "
                "attnlib.score_functions.ScoreFunction(function)",
                rule="M10",
            )
        wanted = MaskKind.BIDIRECTIONAL
        if function is not None and function.needs_bidirectional and self.mask_kind is not wanted:
            raise ContractError(
                f"score function {function} decides about later keys itself, and mask_kind="
                f"{self.mask_kind.value} hides them: set mask_kind='bidirectional'",
                rule="M10",
            )

    def _check_key_selection(self) -> None:
        if self.key_selection is None:
            return
        if not isinstance(self.key_selection, KeySelection):
            raise ContractError(
                f"key_selection={self.key_selection!r} is a {type(self.key_selection).__name__}; "
                "it must be an attnlib.key_selection.KeySelection",
                rule="M11",
            )
        if not self.is_paged:
            raise ContractError(
                f"attn_type={self.attn_type.value} has no paged keys to select from: "
                "key_selection needs a decoder or encoder_decoder layer",
                rule="M11",
            )

    def _check_compressed_entries(self) -> None:
        if self.compressed_entries is None:
            return
        if not isinstance(self.compressed_entries, CompressedEntries):
            raise ContractError(
                f"compressed_entries={self.compressed_entries!r} is a "
                f"{type(self.compressed_entries).__name__}; it must be an "
                "attnlib.compressed_entries.CompressedEntries",
                rule="M17",
            )
        if self.attn_type is not AttentionType.DECODER or self.mask_kind is not MaskKind.CAUSAL:
            raise ContractError(
                f"attn_type={self.attn_type.value} with mask_kind={self.mask_kind.value}: "
                "compressed_entries needs a causal decoder, whose queries see the entries of "
                "earlier tokens",
                rule="M17",
            )
        other = {
            "key_selection": self.key_selection,
            "score_function": self.score_function,
            "has_alibi": self.has_alibi or None,
        }
        for name, value in other.items():
            if value is not None:
                raise ContractError(
                    f"{name}={value} and compressed_entries are both given: a layer with two key "
                    "streams selects entries (CompressedEntries.selection), and its entries have "
                    "no position for biases",
                    rule="M17",
                )

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype that the cache stores."""
        return kv_cache_torch_dtype(self.kv_cache_dtype, self.dtype)

    @property
    def kv_format(self) -> KVFormat:
        """How the cache stores the elements of a head."""
        return kv_cache_format(self.kv_cache_dtype, self.dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token of one layer, with scales in the page."""
        stored = self.kv_format
        size_v = 0 if self.use_mla else stored.bytes_per_head(self.head_size_v)
        return self.num_kv_heads * (stored.bytes_per_head(self.head_size) + size_v)

    @property
    def is_kv_quantized(self) -> bool:
        """True if the cache stores elements of 8 bits or less, with scales."""
        return self.kv_dtype.itemsize == 1

    @property
    def is_causal(self) -> bool:
        """True if every request is causal."""
        return self.mask_kind in _CAUSAL_MASKS

    @property
    def is_paged(self) -> bool:
        """True if keys and values are in the paged cache; encoder self-attention has no cache."""
        return self.attn_type in _PAGED_TYPES

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

    def replace(self, **changes: Any) -> AttentionSpec:
        """A copy with some fields changed; validated again."""
        return replace(self, **changes)


def _rebuild(values: dict[str, Any]) -> AttentionSpec:
    return AttentionSpec(**values)
