"""What an attention layer needs, as one frozen value.

Everything that may decide which backend fits stands here, and nothing else: `capabilities.py` holds exactly one check for each field, and a test
says so. Numbers that vary between layers without deciding anything (the softmax scale, the values of slopes and sinks) belong to the layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import torch

from attnlib.errors import ContractError
from attnlib.kv_dtype import kv_cache_torch_dtype

__all__ = ["AttentionSpec", "AttentionType", "CudaGraphSupport", "MaskKind", "Window"]


class AttentionType(str, Enum):
    """Where a layer stands in its model. Strings, so that torch.compile can see them (as in vLLM)."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class MaskKind(str, Enum):
    """Which keys a layer may see before any window narrows them."""

    CAUSAL = "causal"
    BIDIRECTIONAL = "bidirectional"
    PER_REQUEST = "per_request"
    """A bool per request says whether it is causal (`CommonAttentionMetadata.causal` is a tensor)."""
    QUERY_BIAS = "query_bias"
    """Causal, plus an explicit bias over the query span (`CommonAttentionMetadata.query_bias`): trees, spans, any mask among new tokens."""


class CudaGraphSupport(IntEnum):
    """How much of a backend's work can be captured in a CUDA graph; a model takes the least over its layers."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class Window(NamedTuple):
    """How many keys before and after the query's own are visible (M2). None: all of them. 0: none on that side."""

    left: int | None = None
    right: int | None = None

    @property
    def is_full(self) -> bool:
        """True when neither side is bounded."""
        return self.left is None and self.right is None

    def as_kernel_args(self) -> tuple[int, int]:
        """(left, right) with -1 for an unbounded side: what the kernels take."""
        return (-1 if self.left is None else self.left, -1 if self.right is None else self.right)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Everything about an attention layer that may decide its backend. Checks itself when it is made.

    Attributes:
        num_heads: query heads (Hq) of this rank.
        num_kv_heads: key and value heads (Hkv); None means `num_heads`. Must divide `num_heads`.
        head_size: elements of one query or key head (D).
        head_size_v: elements of one value head (Dv); None means `head_size`.
        dtype: dtype of q, k, v and the output.
        kv_cache_dtype: dtype stored in the cache; "auto" means `dtype`; also "fp8" (= "fp8_e4m3"), "fp8_e5m2", "float16", "bfloat16", "float32".
        kv_scale_kind: granularity of the scales of a quantised cache, "tensor" or "head" (M9).
        block_size: tokens in one cache block (N).
        kv_cache_layout: a layout that the cache must have (P2), or None for whatever the backend reads best.
        attn_type: where the layer stands in its model.
        mask_kind: which keys are visible before any window; None means causal for a decoder, bidirectional elsewhere.
        sliding_window: W keys are visible, the query's own among them (M2); None for all.
        window: the general form of `sliding_window`; give one of the two.
        attention_chunk_size: keys are visible only within the query's own chunk of this many positions (Llama 4); None for no chunks.
        logits_soft_cap: c in c * tanh(score / c); None for none.
        has_alibi: the layer has ALiBi slopes.
        has_sink: the layer has one sink logit per head (M4).
        use_mla: multi-head latent attention: one latent KV head whose value is a prefix of its key (value_cache aliases key_cache).
        needs_lse: the caller wants the log of the softmax denominator back (M5).
        kv_sharing: the layer reads another layer's cache and never writes (P8).
        batch_invariant: a row's bits must not depend on its neighbours (M8).
        cudagraph: how much must be capturable in a CUDA graph.

    Raises:
        ContractError: a field that no attention layer can have; the message names the field, the value and the limit.
    """

    num_heads: int
    head_size: int
    dtype: torch.dtype
    num_kv_heads: int = None  # type: ignore[assignment]  # None is replaced below; readers always see an int
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
    use_mla: bool = False
    needs_lse: bool = False
    kv_sharing: bool = False
    batch_invariant: bool = False
    cudagraph: CudaGraphSupport = CudaGraphSupport.NEVER

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.num_kv_heads is None:
            put(self, "num_kv_heads", self.num_heads)
        if self.head_size_v is None:
            put(self, "head_size_v", self.head_size)
        put(self, "attn_type", AttentionType(self.attn_type))
        if self.mask_kind is None:
            decoder = self.attn_type is AttentionType.DECODER
            put(self, "mask_kind", MaskKind.CAUSAL if decoder else MaskKind.BIDIRECTIONAL)
        put(self, "mask_kind", MaskKind(self.mask_kind))
        put(self, "cudagraph", CudaGraphSupport(self.cudagraph))
        if self.window is not None:
            put(self, "window", Window(*self.window))
        self._check_sizes()
        self._check_mask()
        self._check_dtypes()
        put(self, "_hash", hash(tuple(getattr(self, field.name) for field in fields(self))))

    def __hash__(self) -> int:
        # The spec is half of the selection cache's key and is looked up on every call; hashing twenty fields each time is the larger half.
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        # The stored hash depends on this process's string hashing: another process has to make its own.
        return _rebuild, ({field.name: getattr(self, field.name) for field in fields(self)},)

    def _check_sizes(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_size", "head_size_v", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ContractError(f"{name}={value!r} must be an integer of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ContractError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                f"every KV head serves the same number of query heads"
            )
        if self.use_mla and (self.num_kv_heads != 1 or self.head_size_v > self.head_size):
            raise ContractError(
                f"use_mla needs num_kv_heads=1 and head_size_v <= head_size (the value is a prefix of the key), "
                f"got num_kv_heads={self.num_kv_heads}, head_size_v={self.head_size_v}, head_size={self.head_size}"
            )

    def _check_mask(self) -> None:
        if self.sliding_window is not None and self.window is not None:
            raise ContractError(
                f"sliding_window={self.sliding_window} and window={tuple(self.window)} say the same thing twice: give one"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ContractError(
                f"sliding_window={self.sliding_window} must be at least 1 (1 shows the query's own key only); None for no window",
                rule="M2",
            )
        for side, value in zip(("left", "right"), self.window or (), strict=False):
            if value is not None and value < 0:
                raise ContractError(
                    f"window {side}={value} must not be negative; 0 shows no key on that side, None shows all",
                    rule="M2",
                )
        if self.attention_chunk_size is not None and self.attention_chunk_size < 1:
            raise ContractError(
                f"attention_chunk_size={self.attention_chunk_size} must be at least 1, or None for no chunks"
            )
        if self.logits_soft_cap is not None and not self.logits_soft_cap > 0:
            raise ContractError(
                f"logits_soft_cap={self.logits_soft_cap} must be above 0, or None for no soft cap",
                rule="M3",
            )

    def _check_dtypes(self) -> None:
        if (
            not isinstance(self.dtype, torch.dtype)
            or not self.dtype.is_floating_point
            or self.dtype.itemsize < 2
        ):
            raise ContractError(
                f"dtype={self.dtype!r} must be a floating-point torch dtype of 16 bits or more, such as torch.bfloat16"
            )
        kv_cache_torch_dtype(self.kv_cache_dtype, self.dtype)
        if self.kv_scale_kind not in ("tensor", "head"):
            raise ContractError(
                f"kv_scale_kind={self.kv_scale_kind!r} must be 'tensor' or 'head'", rule="M9"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_dtype(self) -> torch.dtype:
        """The torch dtype that the cache stores."""
        return kv_cache_torch_dtype(self.kv_cache_dtype, self.dtype)

    @property
    def is_kv_quantized(self) -> bool:
        """True when the cache stores 8-bit values with scales."""
        return self.kv_dtype.itemsize == 1

    @property
    def is_causal(self) -> bool:
        """True when a query sees no later key unless the batch itself says otherwise."""
        return self.mask_kind in (MaskKind.CAUSAL, MaskKind.QUERY_BIAS)

    @property
    def is_paged(self) -> bool:
        """True when keys and values live in the paged cache; encoder self-attention has none."""
        return self.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    @property
    def visible_window(self) -> Window:
        """`sliding_window` or `window` in the general form (M2): W shows [p-W+1, p], and |p-k| < W where the layer is not causal."""
        if self.window is not None:
            return self.window
        if self.sliding_window is None:
            return Window()
        return Window(self.sliding_window - 1, 0 if self.is_causal else self.sliding_window - 1)

    def replace(self, **changes: Any) -> AttentionSpec:
        """A copy with some fields changed; it is checked again."""
        return replace(self, **changes)


def _rebuild(values: dict[str, Any]) -> AttentionSpec:
    return AttentionSpec(**values)
