"""Bars: what the time of `triton` on a case must reach, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from attnlib.bench.backends import PRIMARY
from attnlib.bench.results import NO_GRAPH, Row, best_other

__all__ = ["Bar", "bar_lines"]


@dataclass(frozen=True)
class Bar:
    """What a case must reach.

    Attributes:
        limit: most of its time divided by that of `other`.
        other: another case of the same run; "" is the best other backend on the case.
        share: least share of the peak rates of the run; None for a bar of times.
        of_peers: the best other backend on `other`, instead of the same backend.
    """

    limit: float = 0.0
    other: str = ""
    share: float | None = None
    of_peers: bool = False

    def __str__(self) -> str:
        if self.share is not None:
            return f"at least {self.share:.0%} of the peak rates"
        return f"at most {self.limit:.2f} x the time of {self.base}"

    @property
    def base(self) -> str:
        """What the time is compared with."""
        if not self.other:
            return "the best other backend"
        return f"the best other backend on {self.other}" if self.of_peers else self.other


def bar_lines(rows: Sequence[Row], bars: Mapping[str, tuple[Bar, ...]]) -> list[str]:
    """A line for each bar whose case is among the rows, and how many hold; empty without one.

    A bar is unknown where `triton` or what it is compared with has no time in the same run. Eager
    calls of a peer are marked.
    """
    chosen = [row for row in rows if row.backend == PRIMARY and row.case in bars]
    if not chosen:
        return []
    counts = {"holds": 0, "missed": 0, "unknown": 0}
    lines = [f"bars of {PRIMARY}:"]
    for row in chosen:
        for bar in bars[row.case]:
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
    other = _compared(bar, row, rows)
    if other is None or not other.us:
        return "unknown", f"no time of {bar.base}"
    named = other.case if other.backend == row.backend else other.backend
    named += "" if other.how == row.how else f" ({other.how})"
    return _state(row.us <= bar.limit * other.us), f"{row.us / other.us:.3f} of {named}"


def _compared(bar: Bar, row: Row, rows: Sequence[Row]) -> Row | None:
    """The row that a bar of times compares with: eager calls only of peers without a graph."""
    if bar.other and not bar.of_peers:
        return _same_backend(rows, row, bar.other)
    like = replace(row, case=bar.other or row.case)
    return best_other(rows, like) or best_other(
        [other for other in rows if other.note.startswith(NO_GRAPH)], replace(like, how="eager")
    )


def _state(holds: bool) -> str:
    return "holds" if holds else "missed"


def _same_backend(rows: Sequence[Row], row: Row, case: str) -> Row | None:
    """The row of another case of the same backend, run and kind of timing."""
    like = (row.backend, row.run, row.how)
    found = [one for one in rows if one.case == case and (one.backend, one.run, one.how) == like]
    return found[0] if found else None
