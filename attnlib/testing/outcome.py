"""What a probe's case can end in: pass, fail, refused, not run. Only the first is a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

__all__ = ["NotRun", "CaseResult", "UnsupportedCase", "Outcome", "reproduction_line"]


class Outcome(str, Enum):
    """How a case ended."""

    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "refused"
    """The backend said beforehand, with reasons, that it cannot do this."""
    NOT_RUN = "not-run"
    """The machine or the caller gave no chance to find out (no GPU, no second backend)."""


class UnsupportedCase(Exception):
    """Raised inside a case when the backend declares that it cannot serve it."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


class NotRun(Exception):
    """Raised inside a case when it cannot be run here; the text says why."""


@dataclass(frozen=True)
class CaseResult:
    """One case's end.

    Attributes:
        probe: id of the probe, such as "F1".
        case: id of the case within it.
        outcome: how it ended.
        message: empty for a pass; what was wrong, why it was refused or not run.
        reproduce: one command line that runs this case alone.
        uses: capabilities that the case needs, such as "dtypes:bfloat16".
        seconds: how long it took.
    """

    probe: str
    case: str
    outcome: Outcome
    message: str = ""
    reproduce: str = ""
    uses: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def id(self) -> str:
        """PROBE/CASE."""
        return f"{self.probe}/{self.case}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "outcome": self.outcome.value, "uses": list(self.uses)}


def reproduction_line(
    backend: str, probe: str, case: str, seed: int, device: str, quick: bool
) -> str:
    """What runs one case alone: a command, or a call for a class that no path leads to."""
    if "<locals>" in backend:
        name = backend.rsplit(".", 1)[-1]
        return f'run_conformance({name}, only="{probe}/{case}", seed={seed}, device="{device}", quick={quick})'
    extra = f" --device {device}" if device != "cpu" else ""
    return f"attnlib verify {backend} --only {probe}/{case} --seed {seed}{extra}{' --quick' if quick else ''}"
