"""What a score goes through on its way from a dot product to a weight, as one value that this twin passes around."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["ScoreRules"]


@dataclass(frozen=True)
class ScoreRules:
    """The parameters that hold for a whole call, in the order in which they act (M3, M4).

    Attributes:
        scale: factor of the dot product.
        soft_cap: c of `c * tanh(score / c)`; 0 for none.
        alibi_slopes: `[Hq]` float32, or None.
        window: keys visible before and after the query's own; -1 for all, 0 for none.
        chunk: positions per attention chunk; 0 for no chunks.
        sinks: `[Hq]` float32, one more logit per head that only enters the denominator; None for none.
    """

    scale: float
    soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    sinks: Tensor | None = None
