"""Bars: what the time of `triton` on a case must reach, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnlib.bench.backends import PRIMARY
from attnlib.bench.results import Row, best_other

__all__ = ["Bar", "bar_lines"]


@dataclass(frozen=True)
class Bar:
    """What a case must reach.

    Attributes:
        limit: most of its time divided by that of `other`.
        other: another case of the same run; "" is the best other backend on the case.
        share: least share of the peak rates of the run; None for a bar of times.
    """

    limit: float = 0.0
    other: str = ""
    share: float | None = None

    def __str__(self) -> str:
        if self.share is not None:
            return f"at least {self.share:.0%} of the peak rates"
        return f"at most {self.limit:.2f} x the time of {self.other or 'the best other backend'}"


def bar_lines(rows: Sequence[Row], bars: Mapping[str, Bar]) -> list[str]:
    """A line for each bar whose case is among the rows, and how many hold; empty without one.

    A bar is unknown where `triton` or what it is compared with has no time in the same run.
    """
    chosen = [row for row in rows if row.backend == PRIMARY and row.case in bars]
    if not chosen:
        return []
    counts = {"holds": 0, "missed": 0, "unknown": 0}
    lines = [f"bars of {PRIMARY}:"]
    for row in chosen:
        bar = bars[row.case]
        state, found = _reached(bar, row, rows)
        counts[state] += 1
        lines.append(f"  {state:<8} {row.case:<40} {found}; {bar}")
    held, missed, unknown = counts.values()
    return [*lines, f"bars: {held} hold, {missed} missed, {unknown} unknown"]


def _reached(bar: Bar, row: Row, rows: Sequence[Row]) -> tuple[str, str]:
    """(state, what was found)."""
    if not row.us:
        return "unknown", f"{row.status}: {row.reason}" if row.reason else row.status
    if bar.share is not None:
        if row.share is None:
            return "unknown", "no peak rates"
        return _state(row.share >= bar.share), f"{row.share:.1%}"
    other = best_other(rows, row) if not bar.other else _same_backend(rows, row, bar.other)
    if other is None or not other.us:
        return "unknown", f"no time of {bar.other or 'the best other backend'}"
    return _state(row.us <= bar.limit * other.us), (
        f"{row.us / other.us:.3f} of {bar.other or other.backend}"
    )


def _state(holds: bool) -> str:
    return "holds" if holds else "missed"


def _same_backend(rows: Sequence[Row], row: Row, case: str) -> Row | None:
    """The row of another case of the same backend, run and kind of timing."""
    like = (row.backend, row.run, row.how)
    found = [one for one in rows if one.case == case and (one.backend, one.run, one.how) == like]
    return found[0] if found else None
