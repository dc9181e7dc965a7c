"""`StateInputs`, the inputs of a recurrence."""

from __future__ import annotations

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

    def rows(self, rows: slice) -> StateInputs:
        """Some of the tokens."""
        return StateInputs(
            self.query[rows],
            self.key[rows],
            self.value[rows],
            self.log_decay if self.is_constant else self.log_decay[rows],
            None if self.beta is None else self.beta[rows],
        )
