"""What operations on states are given besides slots and a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from attnlib.errors import ContractError

__all__ = ["LEAST_LOG_DECAY", "QK_NORM_EPS", "RecurrenceParams", "StateInputs", "Taps"]

QK_NORM_EPS = 1e-6
"""Added to the sum of squares of a head before the root (T4)."""
LEAST_LOG_DECAY = -104.0
"""Its exp is 0 in float32. Sums of log decays take it in place of lesser ones, so that differences
of these sums stay numbers, and keep most digits of decays near 1 (T5)."""


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


class Taps(NamedTuple):
    """How a convolution weighs the last W tokens (T6).

    Attributes:
        weight: `[C, W]`; the last column belongs to the token itself.
        bias: `[C]`, or None.
        activation: "silu" or None.
    """

    weight: Tensor
    bias: Tensor | None
    activation: str | None


@dataclass(frozen=True, eq=False, kw_only=True)
class RecurrenceParams:
    """How a state is updated and read (T2, T4).

    Attributes:
        scale: factor of q, finite.
        update: "delta" or "add".
        qk_norm: q and k heads are normalized.
        skip: `[Hv]` float32, `skip * v` is added to the output; None adds nothing.
        is_invariant: bits do not depend on the division into steps (T18).

    Raises:
        ContractError: a scale that is not finite.
    """

    scale: float
    update: str = "delta"
    qk_norm: bool = False
    skip: Tensor | None = None
    is_invariant: bool = True

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ContractError(f"scale={self.scale} must be finite", rule="T4")
