"""What the steps of state layers compute from weights: float32 tensors, kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["StepConstants", "update_constants"]


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
