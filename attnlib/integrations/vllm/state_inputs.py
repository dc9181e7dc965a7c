"""What a state layer's step reads: its inputs without their memory, for batches of other sizes, and
what it computes from weights, float32 tensors that are kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["StepConstants", "StepInputs", "update_constants"]


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


class StepConstants:
    """The tensors of one layer. `update_constants` computes them."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor, Callable[..., Any] | None]] = []

    def add(self, weight: Tensor, function: Callable[..., Any] | None = None) -> Tensor:
        """The tensor of one weight.

        Args:
            weight: any dtype; its memory stays where it is.
            function: of a list of float32 tensors, in place (`torch._foreach_exp_`); None to
                convert only.

        Returns:
            The weight itself where nothing is to be computed.
        """
        weight = weight.detach()
        if function is None and weight.dtype == torch.float32:
            return weight
        computed = torch.empty_like(weight, dtype=torch.float32)
        self.parts.append((computed, weight, function))
        return computed


def update_constants(layers: Iterable[StepConstants]) -> Callable[[], None]:
    """A function that computes the tensors of all layers, in a few launches.

    The first layer of each step calls it, also while a CUDA graph is captured: engines load weights
    in place in several ways, some of which no hook sees, and replay graphs afterwards.
    """
    parts = [part for layer in layers for part in layer.parts]
    computed, weights = [part[0] for part in parts], [part[1] for part in parts]
    functions: dict[Callable[..., Any], list[Tensor]] = {}
    for tensor, _, function in parts:
        if function is not None:
            functions.setdefault(function, []).append(tensor)

    def update() -> None:
        if computed:
            torch._foreach_copy_(computed, weights)
        for function, tensors in functions.items():
            function(tensors)

    return update
