"""The values of `AttentionSpec.kv_cache_dtype` and `value_cache_dtype`, and their formats.

`KVFormat` is the one description of a format. The spec, the cache, the operations and the
conformance suite derive sizes and dtypes from it.
"""

from __future__ import annotations

import torch

from attnlib.errors import ContractError
from attnlib.kv_formats import PAGE_FORMATS, KVFormat, find_kv_format, plain_format

__all__ = [
    "KV_CACHE_DTYPES",
    "KV_FORMAT_PAIRS",
    "KVFormat",
    "PAGE_FORMATS",
    "format_pair",
    "is_pair",
    "kv_cache_format",
    "kv_cache_torch_dtype",
    "page_format",
    "plain_format",
]


_KV_DTYPES: dict[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
KV_CACHE_DTYPES = ("auto", *_KV_DTYPES, *PAGE_FORMATS)
"""The names that `AttentionSpec.kv_cache_dtype` takes, besides those of open formats."""
_NAMES = f"{', '.join(KV_CACHE_DTYPES)}, or package:name for an open format"

_PLAIN = "plain"
KV_FORMAT_PAIRS = (
    "int8_per_token_head,int4_per_group",
    "int8_per_token_head,nvfp4",
    *(f"{_PLAIN},{name}" for name in PAGE_FORMATS),
    *(f"{name},{_PLAIN}" for name in PAGE_FORMATS),
)
"""The formats of keys and values that one cache may combine, besides equal ones. Errors of keys
cost far more than those of values, so that pairs have keys of 8 bits and values of 4, or one side
in the dtype of the model ("plain"). Float8 keys are worse than int8 keys, which a rotation helps
(docs/guides/quantized-caches.md)."""


def format_pair(keys: KVFormat, values: KVFormat) -> str | None:
    """The name of a pair, as in `KV_FORMAT_PAIRS`; None for equal formats."""
    if keys == values:
        return None
    return ",".join(
        _PLAIN if side.dtype.is_floating_point and side.dtype.itemsize > 1 else side.name
        for side in (keys, values)
    )


def is_pair(keys: KVFormat, values: KVFormat) -> bool:
    """Whether one cache may combine two formats: those of `KV_FORMAT_PAIRS`, and an open format
    with any other one with scales in the page or with the dtype of the model."""
    pair = format_pair(keys, values)
    if pair in KV_FORMAT_PAIRS or pair is None:
        return True
    names = pair.split(",")
    others = (_PLAIN, *PAGE_FORMATS)
    both = zip((keys, values), names, strict=True)
    has_open = keys.is_open or values.is_open
    return has_open and all(side.is_open or name in others for side, name in both)


def kv_cache_format(
    kv_cache_dtype: str | torch.dtype, dtype: torch.dtype, field: str = "kv_cache_dtype"
) -> KVFormat:
    """The format that a cache stores.

    Args:
        kv_cache_dtype: a dtype, a name, or "auto" for the dtype of the model.
        dtype: dtype of the model.
        field: of a spec that has this value, for messages.

    Raises:
        ContractError: no cache can store this dtype.
    """
    if isinstance(kv_cache_dtype, str) and (
        kv_cache_dtype in PAGE_FORMATS or ":" in kv_cache_dtype
    ):
        return find_kv_format(kv_cache_dtype)
    return plain_format(kv_cache_torch_dtype(kv_cache_dtype, dtype, field))


def page_format(
    elements: torch.Tensor, scale: object, stored: KVFormat | None = None
) -> KVFormat | None:
    """The format of a cache whose `k_scale` (or `v_scale`) is the view of the scales in its pages,
    `[B, N, Hkv, G]`; None if `scale` is a number or a tensor of fewer dimensions (M9).

    Args:
        elements: `key_cache` or `value_cache`, `[B, N, Hkv, stored size]`.
        scale: its scale.
        stored: the format, where the caller knows it. Without it, that of the library with these
            dtypes and sizes: an open format may have the same ones.

    Raises:
        ContractError: no format has these dtypes and sizes.
    """
    if not isinstance(scale, torch.Tensor) or scale.dim() != 4:
        return None
    known = PAGE_FORMATS.values() if stored is None else (stored,)
    for found in known:
        dtypes = (found.dtype, found.scale_dtype) == (elements.dtype, scale.dtype)
        if dtypes and found.num_scales(found.head_size(elements.shape[-1])) == scale.shape[-1]:
            return found
    raise ContractError(
        f"no KV format stores {elements.shape[-1]} elements of {elements.dtype} with "
        f"{scale.shape[-1]} scales of {scale.dtype} per head in its pages; the formats are "
        f"{', '.join(one.name for one in known)}",
        rule="M16",
    )


def kv_cache_torch_dtype(
    kv_cache_dtype: str | torch.dtype, dtype: torch.dtype, field: str = "kv_cache_dtype"
) -> torch.dtype:
    """The dtype that a cache stores.

    Args:
        kv_cache_dtype: a dtype, a name, or "auto" for the dtype of the model.
        dtype: dtype of the model.
        field: of a spec that has this value, for messages.

    Raises:
        ContractError: no cache can store this dtype.
    """
    if isinstance(kv_cache_dtype, torch.dtype):
        if kv_cache_dtype not in (*_KV_DTYPES.values(), dtype):
            raise ContractError(f"{field}={kv_cache_dtype} cannot be stored; use one of {_NAMES}")
        return kv_cache_dtype
    if not isinstance(kv_cache_dtype, str):
        raise ContractError(
            f"{field} is a {type(kv_cache_dtype).__name__}; pass a dtype or a name, for a "
            "KVFormat the name under which it is registered"
        )
    if kv_cache_dtype == "auto":
        return dtype
    if kv_cache_dtype in PAGE_FORMATS or ":" in kv_cache_dtype:
        return find_kv_format(kv_cache_dtype).dtype
    if kv_cache_dtype not in _KV_DTYPES:
        raise ContractError(f"{field}={kv_cache_dtype!r} is not known; use one of {_NAMES}")
    return _KV_DTYPES[kv_cache_dtype]
