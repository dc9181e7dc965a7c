"""Shared memory, mbarriers, TMA and products of emulated kernels (`emulate`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.ops.triton.hopper.emulated_tensors import Tensor, as_gluon, as_torch

__all__ = ["LOCAL", "Barrier", "Deadlock", "Memory", "Products", "QueryMap", "TensorMap"]

WAIT_SECONDS = 20.0
LOCAL = threading.local()
"""The CTA, name, warps and products of the partition that a thread runs, and whether it has waited
for the kernel before."""
LAST_WRITES: list[Callable[[], None]] = []
"""What the kernel before writes until a partition has waited for it."""
EARLY_LOADS: set[str] = set()
"""Partitions that loaded boxes before they waited for it."""


class Deadlock(RuntimeError):
    """A partition waited for an mbarrier longer than `WAIT_SECONDS`."""


class Barrier:
    """An mbarrier."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def update(self, arrivals: int, size: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += size
            assert self.pending >= 0, "more arrivals than an mbarrier expects"
            if self.pending == 0 and self.bytes == 0:
                self.pending, self.phase = self.count, self.phase ^ 1
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase != int(parity), WAIT_SECONDS):
                name = getattr(LOCAL, "partition", "a thread")
                raise Deadlock(f"{name} waited for parity {int(parity)}")


class Memory:
    """Shared memory, or barriers."""

    def __init__(self, content: Any) -> None:
        self.content = content

    @property
    def shape(self) -> list[int]:
        return list(self.content.shape)

    @property
    def dtype(self) -> Any:
        return as_gluon(self.content.dtype)

    @property
    def numel(self) -> int:
        return int(self.content.numel())

    def index(self, index: Any) -> Any:
        found = self.content[int(index)]
        return found if isinstance(found, Barrier) else Memory(found)

    def slice(self, start: Any, length: int, dim: int = 0) -> Memory:
        return Memory(self.content.narrow(dim, int(start), length))

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.content.permute(*order))

    def reinterpret(self, dtype: Any, shape: Sequence[int]) -> Memory:
        """The beginning of the same memory, in another dtype.

        Tiles of Gluon have columns of 128 bytes one after the other, which are tiles themselves. Of
        pairs of those, the result is a copy.
        """
        halves = len(shape) > 1 and self.shape[1:] == [shape[-2], 64] and shape[-1] == 128
        if halves and as_torch(dtype).itemsize == 2:
            parts = self.content[: 2 * shape[0]].view(shape[0], 2, shape[1], 64)
            return Memory(parts.transpose(1, 2).reshape(*shape))
        numbers = self.content.view(-1).view(as_torch(dtype))
        return Memory(numbers[: torch.Size(shape).numel()].view(*shape))

    def load(self, layout: Any = None) -> Tensor:
        return Tensor(self.content.clone())

    def store(self, value: Tensor) -> None:
        assert value.value.dtype == self.content.dtype, "a store changes the dtype"
        self.content.copy_(value.value)


class TensorMap:
    """A TMA descriptor `[blocks, heads, positions, elements]` of a cache view."""

    def __init__(self, tensor: torch.Tensor, box: Sequence[int]) -> None:
        self.tensor, self.box, self.dtype = tensor, list(box), as_gluon(tensor.dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor, box: Sequence[int]) -> TensorMap:
        """The descriptor of a tensor that reads boxes of this many positions and elements."""
        return cls(tensor, box)

    def load(self, place: Sequence[Any], target: Memory) -> int:
        """Copy a box, zeros where it is outside; returns its bytes."""
        block, head, position, element = map(int, place)
        rows, width = self.box
        assert self.box == target.shape, "a box has another shape than its target"
        content = torch.zeros(rows, width, dtype=self.tensor.dtype)
        if 0 <= block < self.tensor.shape[0]:
            found = self.tensor[block, head, position : position + rows, element : element + width]
            content[: found.shape[0], : found.shape[1]] = found
        target.content.copy_(content)
        return rows * width * self.tensor.dtype.itemsize


class QueryMap(TensorMap):
    """A TMA descriptor `[tokens, heads, elements]` of queries."""

    def load(self, place: Sequence[Any], target: Memory) -> int:
        """Copy a box, zeros where it is outside; returns its bytes."""
        token, head, element = map(int, place)
        tokens, heads, width = self.box
        assert [tokens * heads, width] == target.shape, "a box has another shape than its target"
        found = self.tensor[token:, head:, element:][:tokens, :heads, :width]
        content = torch.zeros(tokens, heads, width, dtype=self.tensor.dtype)
        content[tuple(map(slice, found.shape))] = found
        target.content.copy_(content.flatten(0, 1))
        return content.nbytes


class Products:
    """The products of a partition that have been issued and not been waited for."""

    def __init__(self) -> None:
        self.issued: list[tuple[Any, Any, Callable[[], torch.Tensor], Tensor]] = []

    def issue(self, a: Any, b: Memory, acc: Tensor, use_acc: bool) -> Tensor:
        """Issue acc + a @ b; an operand in registers is read at once."""
        if isinstance(a, Tensor):
            a = Tensor(a.value.clone())
        shape, result = (a.shape[0], b.shape[1]), Tensor(None)
        before = (lambda: acc.value.clone()) if use_acc else (lambda: torch.zeros(shape))
        self.issued.append((a, b, before, result))
        return result

    def wait(self, pending: int) -> None:
        """Compute the products but the last `pending` ones."""
        while len(self.issued) > pending:
            a, b, before, result = self.issued.pop(0)
            a, b = (x.content if isinstance(x, Memory) else x.value for x in (a, b))
            assert a.dtype == b.dtype, "operands of a product have different dtypes"
            result.fill(before() + (a.double() @ b.double()).float())
