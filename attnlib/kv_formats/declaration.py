"""`KVFormat`, how a cache stores a head of a token."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.kv_formats.checks import check_names, check_stored
from attnlib.kv_formats.number_table import Number

__all__ = ["KVFormat", "plain_format"]

Encode = Callable[[Tensor], tuple[Tensor, Tensor]]
Decode = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, repr=False)
class KVFormat:
    """How the elements of one head of one token are stored (M16, P16).

    The formats of the library and those of packages are objects of this class. A head of D numbers
    is stored as `stored_size(D)` elements of `dtype` and `num_scales(D)` scales, which depend on
    these D numbers only. A dtype without scales in the page is a plain format: it has a name, a
    dtype and bits.

    Attributes:
        name: value of `AttentionSpec.kv_cache_dtype`; "package:name" for a format of a package.
        dtype: dtype of `key_cache` and `value_cache`, of one byte in formats with scales.
        bits: bits per element, without scales.
        scale_dtype: dtype of the scales in the page: float32, float16, bfloat16, uint8 or int8;
            None for plain formats.
        groups_per_head: scales per head, where their number is fixed; else 0.
        elements_per_group: consecutive elements that share a scale, where their number is fixed;
            else 0.
        largest: the largest magnitude of a stored element, in units of its scale, where a scale is
            the largest magnitude of a group divided by it; else 0.
        head_size_multiple: head sizes must be multiples of this number.
        version: of the stored bytes. Recordings and pickled caches of another version are refused.
        encode: `[n, D]` float32 -> (elements `[n, stored_size(D)]`, scales `[n, num_scales(D)]`),
            with equal bits on every device: divide by a tensor, since torch multiplies by the
            reciprocal of a Python number on CUDA and divides by it on a CPU.
        decode: the reverse, in float32. Both get contiguous tensors.
        error: bound of the root mean square of `decode(encode(x)) - x`, divided by that of `x`,
            averaged over Gaussian heads whose root mean square is in `span`.
        span: (smallest, largest) root mean square of heads for which `error` holds.
        rotated: `error` and the quality of the format need rotated heads (`kv_rotation`, P15).
        number: device function, `number(word, part)`, in the operators of score functions: the
            number that `decode` multiplies by the scale, of element `part` of a 16-bit word. Word i
            of a head holds its elements P i to P i + P - 1, P = 16 / bits. For formats of 4 and 8
            bits with one floating-point scale per head; numbers are below 2^15. With 4 bits also a
            tuple, the numbers of the codes 0 to 15 of bits 4 part to 4 part + 3. On NVIDIA GPUs, a
            few instructions convert two words if the numbers of the codes have 4 bits, equal steps
            that float16 holds, or a bit for the sign and as magnitudes squares (`(a n + b) n + c`)
            or floats of 7 bits; else kernels call the function for each element. None: the format
            is read by the `torch` backend only.

    Raises:
        ContractError: no format can have this value; the message names the field and the limit.
    """

    name: str
    dtype: torch.dtype
    bits: int
    scale_dtype: torch.dtype | None = None
    groups_per_head: int = 0
    elements_per_group: int = 0
    largest: float = 0.0
    head_size_multiple: int = 1
    version: int = 1
    encode: Encode | None = None
    decode: Decode | None = None
    error: float = 0.0
    span: tuple[float, float] = (2.0**-13, 2.0**13)
    rotated: bool = False
    number: Number | None = None

    def __post_init__(self) -> None:
        check_names(self)
        if self.scale_dtype is not None or self.is_open:
            check_stored(self)

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    def __repr__(self) -> str:
        return f"KVFormat({self.name!r}, version={self.version})"

    @property
    def is_open(self) -> bool:
        """Whether it is the format of a package."""
        return ":" in self.name

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

    @property
    def scale_unit(self) -> int:
        """Bytes at whose multiples the scales of a head in a page start; kernels load up to 8."""
        if self.scale_dtype is None:
            return 1
        together = max(1, self.groups_per_head) * self.scale_dtype.itemsize
        return max(self.scale_dtype.itemsize, min(8, together & -together))

    def bytes_per_head(self, head_size: int) -> int:
        """Bytes of one head of one token, with its scales."""
        elements = self.stored_size(head_size) * self.dtype.itemsize
        scales = 0 if self.scale_dtype is None else self.scale_dtype.itemsize
        return elements + scales * self.num_scales(head_size)

    def store(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """What is stored for keys or values `[..., D]`: elements `[..., stored_size(D)]`, and
        scales `[..., num_scales(D)]`.

        Raises:
            ContractError: `encode` returns other dtypes or shapes than the format declares, or
                tensors of another device.
        """
        assert self.encode is not None and self.scale_dtype is not None  # no plain format
        outer, size = values.shape[:-1], values.shape[-1]
        wanted = ((self.dtype, self.stored_size(size)), (self.scale_dtype, self.num_scales(size)))
        rows = math.prod(outer)
        if rows == 0:  # torch cannot reshape them to [0, -1, n], as functions may
            elements, scales = (values.new_empty(0, inner, dtype=dtype) for dtype, inner in wanted)
            return elements.view(*outer, wanted[0][1]), scales.view(*outer, wanted[1][1])
        # Heads may be rows of a fused projection, whose strides no format has to know.
        found = self.encode(values.float().reshape(-1, size).contiguous())
        declared = [(dtype, (rows, inner), str(values.device)) for dtype, inner in wanted]
        if _forms(found) != declared:
            raise ContractError(
                f"encode of {self.name} returns {_forms(found)} for {rows} heads of {size}; its "
                f"fields declare {declared}",
                rule="P16",
            )
        elements, scales = found
        return elements.reshape(*outer, wanted[0][1]), scales.reshape(*outer, wanted[1][1])

    def load(self, elements: Tensor, scales: Tensor) -> Tensor:
        """The real values of stored elements `[..., stored size]` with scales `[..., G]`, float32
        `[..., D]`.

        Raises:
            ContractError: `decode` returns another dtype or shape than `[n, D]` float32, or a
                tensor of another device.
        """
        assert self.decode is not None  # no plain format
        outer, size = elements.shape[:-1], self.head_size(elements.shape[-1])
        if math.prod(outer) == 0:
            return elements.new_empty((*outer, size), dtype=torch.float32)
        inputs = (x.reshape(-1, x.shape[-1]).contiguous() for x in (elements, scales))
        found = self.decode(*inputs)
        wanted = (torch.float32, (math.prod(outer), size), str(elements.device))
        if _forms((found,)) != [wanted]:
            raise ContractError(
                f"decode of {self.name} returns {_forms((found,))}; it must return {[wanted]}",
                rule="P16",
            )
        return found.reshape(*outer, size)


@functools.lru_cache(maxsize=64)
def plain_format(dtype: torch.dtype) -> KVFormat:
    """The format of elements of a dtype without scales in the page."""
    name = str(dtype).removeprefix("torch.")
    return KVFormat(name=name, dtype=dtype, bits=8 * dtype.itemsize)


def _forms(found: Any) -> list[tuple[Any, Any, str]]:
    """Dtypes, shapes and devices of what a function returned."""
    items = found if isinstance(found, tuple | list) else (found,)
    return [
        (x.dtype, tuple(x.shape), str(x.device)) if isinstance(x, Tensor) else (type(x), (), "")
        for x in items
    ]
