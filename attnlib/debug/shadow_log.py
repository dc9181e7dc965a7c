"""The comparisons of live calls with a second backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from attnlib.testing.report import format_table

__all__ = ["ShadowLog", "ShadowRecord", "difference", "rounding_of"]

_ROUNDING = 8
"""Differences up to this multiple of eps * max(|out|) are not compared with the oracle."""


@dataclass(frozen=True)
class ShadowRecord:
    """The comparison of one call.

    Attributes:
        layer: prefix of the layer.
        call: number of the call in this layer.
        out_error: largest absolute difference of the outputs.
        lse_error: largest absolute difference of the LSEs; None if the call returns no LSE.
        message: the errors of a live result above the budget, otherwise "".
        path: the recording of a call above the budget.
        skipped: the reason if the call was not compared, otherwise "".
    """

    layer: str
    call: int
    out_error: float = 0.0
    lse_error: float | None = None
    message: str = ""
    path: Path | None = None
    skipped: str = ""


@dataclass
class ShadowLog:
    """The comparisons of one `shadow` block.

    Attributes:
        backend: name of the second backend.
        records: the compared or skipped calls.
        calls: number of calls, including those that were not sampled.
    """

    backend: str
    records: list[ShadowRecord] = field(default_factory=list)
    calls: int = 0

    @property
    def passed(self) -> bool:
        """True if at least one call was compared and no live result is above the budget."""
        compared = [record for record in self.records if not record.skipped]
        return bool(compared) and not any(record.message for record in compared)

    def __str__(self) -> str:
        """One line per layer with its largest errors, followed by the results above the budget."""
        by_layer: dict[str, list[ShadowRecord]] = {}
        for record in self.records:
            by_layer.setdefault(record.layer, []).append(record)
        rows = []
        for layer, records in by_layer.items():
            done = [record for record in records if not record.skipped]
            lse = [record.lse_error for record in done if record.lse_error is not None]
            rows.append(
                (
                    layer,
                    str(len(done)),
                    f"{max((record.out_error for record in done), default=0.0):.2e}",
                    f"{max(lse):.2e}" if lse else "-",
                    str(sum(bool(record.message) for record in done)),
                    next((record.skipped for record in records if record.skipped), ""),
                )
            )
        header = (
            "layer",
            f"calls compared with {self.backend}",
            "out error",
            "lse error",
            "over budget",
            "not compared",
        )
        wrong = [
            f"{r.layer} call {r.call}: {r.message}; written to {r.path}"
            for r in self.records
            if r.message
        ]
        return "\n".join([format_table(header, rows), *wrong])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; 0 for equal infinities, infinity for NaN."""
    if not a.numel():
        return 0.0
    difference = torch.where(a == b, 0.0, (a.double() - b.double()).abs())
    return float(difference.nan_to_num(nan=float("inf")).max())


def rounding_of(second: torch.Tensor, dtype: torch.dtype) -> float:
    """The difference up to which a result is not compared with the oracle.

    Args:
        second: the result of the second backend.
        dtype: of the layer.
    """
    largest = float(second.abs().max()) if second.numel() else 0.0
    return _ROUNDING * torch.finfo(dtype).eps * max(largest, 1e-3)
