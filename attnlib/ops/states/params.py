"""`RecurrenceParams`, the parameters of a recurrence besides its inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from attnlib.errors import ContractError

__all__ = ["QK_NORM_EPS", "RecurrenceParams"]

QK_NORM_EPS = 1e-6
"""Added to the sum of squares of a head before the root (T4)."""


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
