"""What a backend declares to support."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from attnlib.errors import RegistrationError
from attnlib.sizes import Sizes
from attnlib.spec import AttentionType, CudaGraphSupport, MaskKind

__all__ = ["NOT_STATED", "Capabilities", "Declaration"]


class _NotStated:
    """The value of a capability that a backend does not state."""

    _instance: _NotStated | None = None

    def __new__(cls) -> _NotStated:
        cls._instance = cls._instance or super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "NOT_STATED"

    def __reduce__(self) -> str:
        return "NOT_STATED"

    def __bool__(self) -> bool:
        return False


NOT_STATED: Any = _NotStated()


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a backend supports for one kind of layers. A field that is not stated counts as
    unsupported.

    Attributes:
        devices: torch device types, such as ("cpu", "cuda").
        min_capability: lowest CUDA compute capability; None for any.
        max_capability: highest CUDA compute capability; None for any.
        rocm: AMD devices.

    Raises:
        RegistrationError: the value of a field has another type than the field.
    """

    devices: tuple[str, ...] = NOT_STATED
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    rocm: bool = False

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, kind in _field_types(cls).items():
            value = getattr(self, name)
            if value is not NOT_STATED and not _fits(value, kind):
                raise RegistrationError(
                    f"capability {name}={value!r} must be {_described(kind)}: change it, or leave "
                    f"{name} out"
                )

    def stated(self) -> dict[str, Any]:
        """The stated fields, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) is not NOT_STATED
        }


@dataclass(frozen=True, kw_only=True)
class Capabilities(Declaration):
    """What a backend supports of attention layers. A field that is not stated counts as
    unsupported.

    Attributes:
        devices, min_capability, max_capability, rocm: as in `Declaration`.
        dtypes: dtypes of q, k, v and the output.
        kv_cache_dtypes: dtypes that the cache may store. A cache in the dtype of the model also
            needs this dtype in `dtypes`.
        kv_formats: formats with scales in the page, by name (M16). They need no entry in
            `kv_cache_dtypes` and `kv_scale_kinds`.
        kv_format_pairs: pairs of formats of keys and of values, besides equal ones
            (`kv_dtype.KV_FORMAT_PAIRS`).
        open_kv_formats: formats of packages (P16) that are not in `kv_formats`, alone or in pairs.
        kv_scale_kinds: granularities of the scales of a quantized cache, of "tensor" and "head";
            () without a quantized cache.
        head_sizes: elements of one query or key head.
        head_size_v_may_differ: values may have another head size than keys.
        block_sizes: tokens per cache block.
        kv_cache_layouts: cache layouts, the preferred one first; "ANY" means any strides.
        group_sizes: query heads per KV head.
        attn_types: roles of a layer in its model.
        mask_kinds: masks before windows.
        sliding_window: sliding windows, and windows in the general form.
        attention_chunks: attention within chunks.
        logits_soft_cap, alibi, sink, score_function, mla, lse, kv_sharing, batch_invariant: the
            features of the spec with these names.
        query_tensors: score functions with tensors of query tokens (M21).
        token_sinks: sinks of query tokens (M22).
        key_selection: attention to selected keys (M11).
        compressed_entries: two key streams under one softmax (M17).
        cudagraph: batches that a CUDA graph can capture.
        needs_finite_cache: unused cache elements must be finite (P5). Allocation fills them with
            zeros.
        least_product: product of a query and a key, before the scale, below which its kernels hide
            a key: a row without a larger one is 0. FlashInfer: -5e4.
        deterministic: two equal calls give equal bits (M8).
        allocates_in_forward: its kernels allocate temporary memory from torch in each call, in
            addition to the declared workspace.
        rotary_write: `AttentionImpl.rotate_and_write_kv` is one launch (P11), except for open
            formats (P16). Without it, the same result takes separate launches.

    Raises:
        RegistrationError: the value of a field has another type than the field.
    """

    dtypes: tuple[torch.dtype, ...] = NOT_STATED
    kv_cache_dtypes: tuple[torch.dtype, ...] = NOT_STATED
    kv_formats: tuple[str, ...] = NOT_STATED
    kv_format_pairs: tuple[str, ...] = NOT_STATED
    open_kv_formats: bool = False
    kv_scale_kinds: tuple[str, ...] = NOT_STATED
    head_sizes: Sizes = NOT_STATED
    head_size_v_may_differ: bool = NOT_STATED
    block_sizes: Sizes = NOT_STATED
    kv_cache_layouts: tuple[str, ...] = NOT_STATED
    group_sizes: Sizes = NOT_STATED
    attn_types: tuple[AttentionType, ...] = NOT_STATED
    mask_kinds: tuple[MaskKind, ...] = NOT_STATED
    sliding_window: bool = NOT_STATED
    attention_chunks: bool = NOT_STATED
    logits_soft_cap: bool = NOT_STATED
    alibi: bool = NOT_STATED
    sink: bool = NOT_STATED
    score_function: bool = NOT_STATED
    query_tensors: bool = NOT_STATED
    token_sinks: bool = NOT_STATED
    key_selection: bool = NOT_STATED
    compressed_entries: bool = NOT_STATED
    mla: bool = NOT_STATED
    lse: bool = NOT_STATED
    kv_sharing: bool = NOT_STATED
    batch_invariant: bool = NOT_STATED
    cudagraph: CudaGraphSupport = NOT_STATED
    needs_finite_cache: bool = False
    least_product: float = -math.inf
    deterministic: bool = True
    allocates_in_forward: bool = False
    rotary_write: bool = False


@lru_cache(maxsize=16)
def _field_types(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value has the type of a field: a class, a tuple of classes, or a union of these."""
    if get_origin(kind) is UnionType:
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is not tuple:
        return isinstance(value, kind)
    kinds = get_args(kind)
    if not isinstance(value, tuple):
        return False
    if kinds[-1] is Ellipsis:
        return all(isinstance(item, kinds[0]) for item in value)
    return len(value) == len(kinds) and all(map(isinstance, value, kinds))


def _described(kind: Any) -> str:
    if kind is bool:
        return "True or False"
    if kind is Sizes:
        return "an attnlib.Sizes, such as Sizes(exactly=(64, 128)) or Sizes(minimum=16)"
    if get_origin(kind) is UnionType:
        return "a pair of integers, such as (9, 0), or None"
    if get_origin(kind) is tuple:
        return f"a tuple of {get_args(kind)[0].__name__}"
    return f"a {kind.__name__}"
