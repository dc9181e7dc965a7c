"""The inputs of a state layer's step without their memory, for batches of other sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["StepInputs"]


class _Rows(NamedTuple):
    """What kernels are compiled for: dtype, shape and strides of rows, and alignment."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Rows:
        offset = tensor.data_ptr() % 16 // tensor.itemsize
        return cls(tensor.dtype, tuple(tensor.shape[1:]), tensor.stride(), offset)

    def zeros(self, count: int, device: torch.device) -> Tensor:
        longest = self.offset + max(count, 1) * max(self.stride[0], 1)
        memory = torch.zeros(longest, dtype=self.dtype, device=device)
        return memory[self.offset :].as_strided((count, *self.shape), self.stride)


@dataclass(frozen=True)
class StepInputs:
    """The rows of the tensors of a call of `StateLayer.step`, as vLLM's projections leave them."""

    x: _Rows
    gates: tuple[_Rows | None, ...]
    output: _Rows
    device: torch.device

    @classmethod
    def of(cls, x: Tensor, gates: Any, output: Tensor) -> StepInputs:
        """Those of a call."""
        rows = tuple(None if gate is None else _Rows.of(gate) for gate in gates)
        return cls(_Rows.of(x), rows, _Rows.of(output), x.device)

    def zeros(self, tokens: int) -> tuple[Tensor, Any, Tensor]:
        """`x`, `gates` and `output` of a batch of so many tokens."""
        x, output = (each.zeros(tokens, self.device) for each in (self.x, self.output))
        gates = tuple(gate and gate.zeros(tokens, self.device) for gate in self.gates)
        return x, gates, output
