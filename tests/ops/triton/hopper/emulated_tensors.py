"""Tensors and pointers of emulated kernels (`emulate`), on torch tensors."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl

__all__ = ["LAYOUT", "Chosen", "Pointer", "Tensor", "as_gluon", "as_torch", "raw"]

_TORCH = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "int1": torch.bool,
    "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32,
    "uint32": torch.int64, "int64": torch.int64, "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}  # fmt: skip


def as_torch(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else _TORCH[str(dtype)]


def as_gluon(dtype: torch.dtype) -> Any:
    names = {value: name for name, value in _TORCH.items() if name != "uint32"}
    name = names[dtype].replace("fp", "float").replace("bf16", "bfloat16")
    return getattr(gl, name)


class _Layout:
    """Stands for every layout."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


LAYOUT = _Layout()


def raw(x: Any) -> Any:
    return x.value if isinstance(x, Tensor) else x


class Tensor:
    """A tensor or a scalar of a kernel."""

    def __init__(self, value: torch.Tensor | None) -> None:
        self._value = value

    @property
    def value(self) -> torch.Tensor:
        if self._value is None:
            raise AssertionError("the result of a product was read before it was waited for")
        return self._value

    def fill(self, value: torch.Tensor) -> None:
        self._value = value

    @property
    def shape(self) -> list[int]:
        return list(self.value.shape)

    @property
    def dtype(self) -> Any:
        return as_gluon(self.value.dtype)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=LAYOUT)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        to = as_torch(dtype)
        return Tensor(self.value.view(to) if bitcast else self.value.to(to))

    def reshape(self, shape: Sequence[int]) -> Tensor:
        return Tensor(self.value.reshape(tuple(shape)))

    def permute(self, order: Sequence[int]) -> Tensor:
        return Tensor(self.value.permute(*order))

    def split(self) -> tuple[Tensor, Tensor]:
        assert self.shape[-1] == 2
        return Tensor(self.value[..., 0]), Tensor(self.value[..., 1])

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.value[index])

    def __index__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __invert__(self) -> Tensor:
        return Tensor(~self.value)

    def __neg__(self) -> Tensor:
        return Tensor(-self.value)

    def _binary(self, other: Any, apply: Callable[[Any, Any], Any], swap: bool = False) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = self.value, raw(other)
        return Tensor(apply(b, a) if swap else apply(a, b))


def _divide(a: Any, b: Any) -> Any:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return torch.div(a, b, rounding_mode="trunc")


def _modulo(a: Any, b: Any) -> Any:
    return torch.fmod(torch.as_tensor(a), torch.as_tensor(b))


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b, "floordiv": _divide, "mod": _modulo,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "lshift": lambda a, b: a << b, "rshift": lambda a, b: a >> b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
for _name, _apply in _OPERATIONS.items():

    def _forward(self: Any, other: Any, _apply: Any = _apply) -> Any:
        return self._binary(other, _apply)

    def _backward(self: Any, other: Any, _apply: Any = _apply) -> Any:
        return self._binary(other, _apply, True)

    setattr(Tensor, f"__{_name}__", _forward)
    setattr(Tensor, f"__r{_name}__", _backward)
Tensor.__hash__ = object.__hash__  # type: ignore[method-assign]


class Pointer:
    """Addresses in a tensor's memory."""

    def __init__(self, memory: torch.Tensor, dtype: Any, offset: Any = 0) -> None:
        self.memory, self.element = memory, dtype
        self.offset = torch.as_tensor(offset)  # bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Pointer:
        """The address of a tensor's first element; its storage can be reached."""
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return cls(storage, as_gluon(tensor.dtype), tensor.storage_offset() * tensor.itemsize)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.element)

    def to(self, dtype: Any, bitcast: bool = False) -> Pointer:
        element = getattr(dtype, "element_ty", self.element)
        return Pointer(self.memory, element, self.offset)

    def __add__(self, other: Any) -> Pointer:
        step = torch.as_tensor(raw(other)).long() * as_torch(self.element).itemsize
        return Pointer(self.memory, self.element, self.offset + step)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return Pointer.__add__(self, -other)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.element, self.offset[index])

    def _places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = as_torch(self.element).itemsize
        elements = self.memory[: self.memory.numel() // size * size].view(as_torch(self.element))
        inside = torch.as_tensor(True if mask is None else raw(mask)).bool()
        inside = inside.expand_as(self.offset + inside)
        offset = self.offset.expand_as(inside)
        place = offset[inside]
        assert not (place % size).any() and (place >= 0).all(), "an address is not aligned"
        assert (place // size < elements.numel()).all(), "an address is outside of its tensor"
        return elements, inside, offset // size

    def load(self, mask: Any, other: Any) -> Tensor:
        elements, inside, place = self._places(mask)
        found = elements[torch.where(inside, place, 0)]
        fill = torch.as_tensor(0 if other is None else raw(other)).to(found.dtype)
        return Tensor(torch.where(inside, found, fill))

    def store(self, value: Any, mask: Any) -> None:
        elements, inside, place = self._places(mask)
        value = torch.as_tensor(raw(value)).to(elements.dtype).broadcast_to(place.shape)
        elements[place[inside]] = value[inside]


class Chosen:
    """Addresses of which a condition takes those in one tensor's memory or in another one's."""

    def __init__(self, condition: Tensor, first: Pointer, second: Pointer) -> None:
        self.condition, self.parts = condition, (first, second)

    def load(self, mask: Any, other: Any) -> Tensor:
        """Read the chosen ones only."""
        inside = Tensor(torch.as_tensor(True if mask is None else raw(mask)))
        where = self.condition.value
        taken = (inside & self.condition, inside & ~self.condition)
        a, b = (part.load(x, other).value for part, x in zip(self.parts, taken, strict=True))
        return Tensor(torch.where(where, a, b))
