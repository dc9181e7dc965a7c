"""The decision as data: what was chosen, what was not, and every reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

__all__ = ["CandidateReport", "SelectionReport", "SelectionStatus"]


class SelectionStatus(str, Enum):
    """What became of a candidate."""

    ACCEPTED = "accepted"
    UNSUPPORTED = "unsupported"
    """It is here, and refuses the spec or the device."""
    UNAVAILABLE = "unavailable"
    """Its package, compiler or driver is missing."""
    EXCLUDED = "excluded"
    """The user took it out of auto; it was not even imported."""


@dataclass(frozen=True)
class CandidateReport:
    """One backend and what became of it.

    Attributes:
        name: its name.
        status: what became of it.
        reasons: why not, all of them; for an accepted one, what speaks of it (lower priority, needs a finite cache).
    """

    name: str
    status: SelectionStatus
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class SelectionReport:
    """A whole decision.

    Attributes:
        chosen: name of the chosen backend, or None when no candidate fits.
        source: who decided: "argument", "use_backend", "ATTNLIB_BACKEND" or "auto".
        device: the device it was decided for.
        candidates: every backend that was looked at, in the order of priority.
    """

    chosen: str | None
    source: str
    device: str
    candidates: tuple[CandidateReport, ...]

    def reasons(self) -> dict[str, list[str]]:
        """Backend -> why it was not accepted; empty for those that were."""
        return {
            c.name: [] if c.status is SelectionStatus.ACCEPTED else list(c.reasons)
            for c in self.candidates
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        how = (
            "auto; backend= or ATTNLIB_BACKEND=<name> insists and never falls back"
            if self.source == "auto"
            else f"insisted on by {self.source}"
        )
        width = max((len(c.name) for c in self.candidates), default=0)
        lines = [
            f"attnlib chose {self.chosen or 'nothing':<{max(width - 12, 4)}} on {self.device}  ({how})"
        ]
        for candidate in self.candidates:
            head = f"  {candidate.name:<{width}}  {candidate.status.value:<11}"
            for index, reason in enumerate(candidate.reasons or ("",)):
                begin = head.rstrip() if index == 0 else " " * len(head.rstrip())
                lines.append(begin + (f"  {reason}" if reason else ""))
        return "\n".join(lines)
