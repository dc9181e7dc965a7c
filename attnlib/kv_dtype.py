"""How a cache stores keys and values: its dtype, and where its scales are (M9, M16).

`KVFormat` is the one description of a format. The spec, the cache, the operations and the
conformance suite derive sizes and dtypes from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlib.errors import ContractError

__all__ = [
    "KV_CACHE_DTYPES", "KV_FORMAT_PAIRS", "KVFormat", "PAGE_FORMATS", "format_pair",
    "kv_cache_format", "kv_cache_torch_dtype", "page_format", "plain_format",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KVFormat:
    """How the elements of one head of one token are stored.

    Attributes:
        name: value of `AttentionSpec.kv_cache_dtype`.
        dtype: dtype of `key_cache` and `value_cache`.
        bits: bits per element.
        scale_dtype: dtype of the scales in the page; None for formats without them.
        groups_per_head: groups of consecutive elements of a head that have one scale each; 0 where
            the size of a group is fixed.
        elements_per_group: elements that share a scale; 0 where their number per head is fixed.
        largest: the largest magnitude of a stored element, in units of its scale; 0 for formats
            without scales in the page.
        head_size_multiple: head sizes must be multiples of this number.
    """

    name: str
    dtype: torch.dtype
    bits: int
    scale_dtype: torch.dtype | None = None
    groups_per_head: int = 0
    elements_per_group: int = 0
    largest: float = 0.0
    head_size_multiple: int = 1

    @property
    def scales_in_page(self) -> bool:
        """Whether each page holds the scales of its tokens (M16)."""
        return self.scale_dtype is not None

    def stored_size(self, head_size: int) -> int:
        """Elements of `dtype` in which one head of one token is stored."""
        return head_size * self.bits // (8 * self.dtype.itemsize)

    def head_size(self, stored_size: int) -> int:
        """The head size that `stored_size` elements of `dtype` hold."""
        return stored_size * 8 * self.dtype.itemsize // self.bits

    def num_scales(self, head_size: int) -> int:
        """Scales in the page for one head of one token."""
        if self.elements_per_group:
            return head_size // self.elements_per_group
        return self.groups_per_head

    def bytes_per_head(self, head_size: int) -> int:
        """Bytes of one head of one token, with its scales."""
        scales = 0 if self.scale_dtype is None else self.scale_dtype.itemsize
        return self.stored_size(head_size) * self.dtype.itemsize + scales * self.num_scales(
            head_size
        )


PAGE_FORMATS: dict[str, KVFormat] = {
    found.name: found
    for found in (
        KVFormat(
            name="int8_per_token_head", dtype=torch.int8, bits=8, scale_dtype=torch.float32,
            groups_per_head=1, largest=127.0,
        ),
        KVFormat(
            name="fp8_per_token_head", dtype=torch.float8_e4m3fn, bits=8,
            scale_dtype=torch.float32, groups_per_head=1, largest=448.0,
        ),
        KVFormat(
            name="int4_per_group", dtype=torch.uint8, bits=4, scale_dtype=torch.float16,
            groups_per_head=4, largest=7.0, head_size_multiple=8,
        ),
        # Scales of 8 bits (e4m3, e8m0) are bytes, which every chip can load.
        KVFormat(
            name="nvfp4", dtype=torch.uint8, bits=4, scale_dtype=torch.uint8,
            elements_per_group=16, largest=6.0, head_size_multiple=16,
        ),
        KVFormat(
            name="mxfp4", dtype=torch.uint8, bits=4, scale_dtype=torch.uint8,
            elements_per_group=32, largest=6.0, head_size_multiple=32,
        ),
    )
}  # fmt: skip
"""The formats with scales in the page, by name."""

_KV_DTYPES: dict[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
KV_CACHE_DTYPES = ("auto", *_KV_DTYPES, *PAGE_FORMATS)
"""The names that `AttentionSpec.kv_cache_dtype` takes."""
_NAMES = ", ".join(KV_CACHE_DTYPES)

_PLAIN = "plain"
_KEYS, _VALUES = ("int8_per_token_head", "fp8_per_token_head"), ("int4_per_group", "nvfp4")
KV_FORMAT_PAIRS = (
    *(f"{key},{value}" for key in _KEYS for value in _VALUES),
    *(f"{_PLAIN},{name}" for name in PAGE_FORMATS),
    *(f"{name},{_PLAIN}" for name in PAGE_FORMATS),
)
"""The formats of keys and values that one cache may combine, besides equal ones. Errors of keys
cost far more than those of values, so that pairs have keys of 8 bits and values of 4, or one side
in the dtype of the model ("plain")."""


def format_pair(keys: KVFormat, values: KVFormat) -> str | None:
    """The name of a pair, as in `KV_FORMAT_PAIRS`; None for equal formats."""
    if keys == values:
        return None
    return ",".join(
        _PLAIN if side.dtype.is_floating_point and side.dtype.itemsize > 1 else side.name
        for side in (keys, values)
    )


def kv_cache_format(kv_cache_dtype: str | torch.dtype, dtype: torch.dtype) -> KVFormat:
    """The format that a cache stores.

    Args:
        kv_cache_dtype: a dtype, a name, or "auto" for the dtype of the model.
        dtype: dtype of the model.

    Raises:
        ContractError: no cache can store this dtype.
    """
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype in PAGE_FORMATS:
        return PAGE_FORMATS[kv_cache_dtype]
    return plain_format(kv_cache_torch_dtype(kv_cache_dtype, dtype))


def page_format(elements: torch.Tensor, scale: object) -> KVFormat | None:
    """The format of a cache whose `k_scale` (or `v_scale`) is the view of the scales in its pages,
    `[B, N, Hkv, G]`; None if `scale` is a number or a tensor of fewer dimensions (M9).

    Args:
        elements: `key_cache` or `value_cache`, `[B, N, Hkv, stored size]`.
        scale: its scale.

    Raises:
        ContractError: no format has these dtypes and sizes.
    """
    if not isinstance(scale, torch.Tensor) or scale.dim() != 4:
        return None
    for found in PAGE_FORMATS.values():
        dtypes = (found.dtype, found.scale_dtype) == (elements.dtype, scale.dtype)
        if dtypes and found.num_scales(found.head_size(elements.shape[-1])) == scale.shape[-1]:
            return found
    raise ContractError(
        f"no KV format stores {elements.shape[-1]} elements of {elements.dtype} with "
        f"{scale.shape[-1]} scales of {scale.dtype} per head in its pages; the formats are "
        f"{', '.join(PAGE_FORMATS)}",
        rule="M16",
    )


def kv_cache_torch_dtype(kv_cache_dtype: str | torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a cache stores.

    Args:
        kv_cache_dtype: a dtype, a name, or "auto" for the dtype of the model.
        dtype: dtype of the model.

    Raises:
        ContractError: no cache can store this dtype.
    """
    if isinstance(kv_cache_dtype, torch.dtype):
        if kv_cache_dtype not in (*_KV_DTYPES.values(), dtype):
            raise ContractError(
                f"kv_cache_dtype={kv_cache_dtype} cannot be stored; use one of {_NAMES}"
            )
        return kv_cache_dtype
    if kv_cache_dtype == "auto":
        return dtype
    if kv_cache_dtype in PAGE_FORMATS:
        return PAGE_FORMATS[kv_cache_dtype].dtype
    if kv_cache_dtype not in _KV_DTYPES:
        raise ContractError(f"kv_cache_dtype={kv_cache_dtype!r} is not known; use one of {_NAMES}")
    return _KV_DTYPES[kv_cache_dtype]


def plain_format(dtype: torch.dtype) -> KVFormat:
    """The format of elements of a dtype without scales in the page."""
    name = str(dtype).removeprefix("torch.")
    return KVFormat(name=name, dtype=dtype, bits=8 * dtype.itemsize)
