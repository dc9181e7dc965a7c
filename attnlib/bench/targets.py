"""Targets: what the time of `triton` on a case must reach, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from attnlib.bench.backends import PRIMARY
from attnlib.bench.results import NO_GRAPH, Row, best_other

__all__ = ["Target", "target_lines"]


@dataclass(frozen=True)
class Target:
    """What a case must reach.

    Attributes:
        limit: most of its time divided by that of `other`.
        other: another case of the same run; "" is the best other backend on the case.
        share: least share of the peak rates of the run; None for a target of times.
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


def target_lines(rows: Sequence[Row], targets: Mapping[str, tuple[Target, ...]]) -> list[str]:
    """A line for each target whose case is among the rows, and how many are met, or nothing.

    A target is unknown where `triton` or what it is compared with has no time in the same run.
    Eager calls of another backend are marked.
    """
    chosen = [row for row in rows if row.backend == PRIMARY and row.case in targets]
    if not chosen:
        return []
    counts = {"met": 0, "missed": 0, "unknown": 0}
    lines = [f"targets of {PRIMARY}:"]
    for row in chosen:
        for target in targets[row.case]:
            state, found = _reached(target, row, rows)
            counts[state] += 1
            lines.append(f"  {state:<8} {row.case:<40} {found}; {target}")
    met, missed, unknown = counts.values()
    return [*lines, f"targets: {met} met, {missed} missed, {unknown} unknown"]


def _reached(target: Target, row: Row, rows: Sequence[Row]) -> tuple[str, str]:
    """(state, what was found)."""
    if not row.us:
        return "unknown", f"{row.status}: {row.reason}" if row.reason else row.status
    if target.share is not None:
        if row.share is None:
            return "unknown", "no peak rates"
        return _state(row.share >= target.share), f"{row.share:.1%}"
    other = _compared(target, row, rows)
    if other is None or not other.us:
        return "unknown", f"no time of {target.base}"
    named = other.case if other.backend == row.backend else other.backend
    named += "" if other.how == row.how else f" ({other.how})"
    return _state(row.us <= target.limit * other.us), f"{row.us / other.us:.3f} of {named}"


def _compared(target: Target, row: Row, rows: Sequence[Row]) -> Row | None:
    """The row that a target of times compares with: eager calls only of peers without a graph."""
    if target.other and not target.of_peers:
        return _same_backend(rows, row, target.other)
    like = replace(row, case=target.other or row.case)
    return best_other(rows, like) or best_other(
        [other for other in rows if other.note.startswith(NO_GRAPH)], replace(like, how="eager")
    )


def _state(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _same_backend(rows: Sequence[Row], row: Row, case: str) -> Row | None:
    """The row of another case of the same backend, run and kind of timing."""
    like = (row.backend, row.run, row.how)
    found = [one for one in rows if one.case == case and (one.backend, one.run, one.how) == like]
    return found[0] if found else None
