"""How one case of the conformance suite ends: pass, fail, unsupported or not run.

Only `Outcome.PASS` counts as a pass. Unsupported and skipped cases are reported separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

__all__ = ["CaseResult", "NotRun", "Outcome", "UnsupportedCase", "reproduction_line"]


class Outcome(str, Enum):
    """The outcome of one case."""

    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported"
    """The backend declares, with reasons, that it does not support the case."""
    NOT_RUN = "not run"
    """The case needs something that this machine or caller does not provide, such as a GPU."""


class UnsupportedCase(Exception):
    """Raised inside a case that the backend declares as unsupported.

    Args:
        reasons: one sentence for each unsupported feature.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


class NotRun(Exception):
    """Raised inside a case that cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class CaseResult:
    """The result of one case.

    Attributes:
        check: id of the check, such as "F1".
        case: id of the case within the check.
        outcome: how the case ended.
        message: empty for a pass; otherwise the error or the reason for skipping the case.
        reproduce: command line that runs only this case.
        uses: capabilities that the case needs, such as "dtypes:bfloat16".
        seconds: run time.
    """

    check: str
    case: str
    outcome: Outcome
    message: str = ""
    reproduce: str = ""
    uses: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def id(self) -> str:
        """CHECK/CASE."""
        return f"{self.check}/{self.case}"

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {**asdict(self), "outcome": self.outcome.value, "uses": list(self.uses)}


def reproduction_line(
    backend: str,
    check: str,
    case: str,
    seed: int,
    device: str,
    quick: bool,
    score: str | None = None,
    kv_format: str | None = None,
) -> str:
    """The shell command that runs one case, or a Python call for a class defined in a function."""
    if "<locals>" in backend:
        name = backend.rsplit(".", 1)[-1]
        return (
            f'run_conformance({name}, only="{check}/{case}", seed={seed}, device="{device}", '
            f"quick={quick})"
        )
    options = f" --device {device}" if device != "cpu" else ""
    options += " --quick" if quick else ""
    options += f" --score {score}" if score else ""
    options += f" --kv-format {kv_format}" if kv_format else ""
    return f"attnlib verify {backend} --only {check}/{case} --seed {seed}{options}"
