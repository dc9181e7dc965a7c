"""`StateInputs`, the inputs of a recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

__all__ = ["StateInputs"]


class StateInputs(NamedTuple):
    """The inputs of a recurrence for T tokens.

    Attributes:
        query, key: `[T, Hk, Dk]`, strided; a backend may need a dense last dimension.
        value: `[T, Hv, Dv]`, likewise.
        log_decay: `[T, Hv]` or `[T, Hv, Dk]` float32, or `[Hv]` of the layer (T5).
        beta: `[T, Hv]` float32; None if the layer has none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor | None

    @property
    def is_constant(self) -> bool:
        """Whether the decay belongs to the layer and not to the tokens."""
        return self.log_decay.dim() == 1

    def each(self, change: Callable[[Tensor], Tensor]) -> StateInputs:
        """Other inputs, of which `change` makes each tensor of the tokens."""
        query, key, value, decay, beta = self
        return StateInputs(
            change(query),
            change(key),
            change(value),
            decay if self.is_constant else change(decay),
            None if beta is None else change(beta),
        )

    def rows(self, rows: slice) -> StateInputs:
        """Some of the tokens."""
        return self.each(lambda x: x[rows])
