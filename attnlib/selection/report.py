"""The result of a selection as data: what was chosen, what was not, and every reason."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from attnlib.errors import (
    AttnlibError,
    BackendUnavailableError,
    Rejection,
    UnsupportedConfigError,
)
from attnlib.spec import LayerSpec

__all__ = ["CandidateReport", "SelectionReport", "SelectionStatus", "selection_error"]

_WIDTH = 90
"""Columns of the printed report; the pages of the documentation show lines of this length."""


class SelectionStatus(str, Enum):
    """What selection found out about one backend."""

    ACCEPTED = "accepted"
    """It is available and supports the layer."""
    UNSUPPORTED = "unsupported"
    """It is available, but does not support the layer or the device."""
    UNAVAILABLE = "unavailable"
    """Its package, compiler or driver is missing or broken."""
    EXCLUDED = "excluded"
    """The user excluded it from auto; it was not imported."""


@dataclass(frozen=True)
class CandidateReport:
    """One backend in a `SelectionReport`.

    Attributes:
        name: its name.
        status: what selection found out about it.
        reasons: all reasons why it was not chosen; for the chosen one, why it was, if that is more
            than its priority.
        explain_lines: for an accepted backend, the kernels that it runs, and its requirements.
    """

    name: str
    status: SelectionStatus
    reasons: tuple[str, ...] = ()
    explain_lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class SelectionReport:
    """The result of one selection.

    Attributes:
        chosen: name of the chosen backend, or None if no candidate fits.
        source: where the choice came from: "argument", "use_backend", "ATTNLIB_BACKEND" or "auto".
        device: the device it was made for.
        candidates: every backend that was considered, in the order of auto.
    """

    chosen: str | None
    source: str
    device: str
    candidates: tuple[CandidateReport, ...]

    @property
    def accepted(self) -> tuple[str, ...]:
        """Names of the accepted candidates."""
        return tuple(c.name for c in self.candidates if c.status is SelectionStatus.ACCEPTED)

    def reasons(self) -> dict[str, list[str]]:
        """Backend name -> why it was not accepted; empty for accepted ones."""
        return {
            c.name: [] if c.status is SelectionStatus.ACCEPTED else list(c.reasons)
            for c in self.candidates
        }

    def rejections(self) -> list[Rejection]:
        """Every reason against every backend that was not accepted, in the order of auto."""
        return [
            Rejection(c.name, c.status.value, getattr(reason, "field", None), str(reason))
            for c in self.candidates
            if c.status is not SelectionStatus.ACCEPTED
            for reason in c.reasons
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def one_line(self) -> str:
        """The choice and the reasons against other candidates, for the log."""
        others = [
            f"{c.name}: {c.status.value} ({', '.join(c.reasons)})"
            for c in self.candidates
            if c.name != self.chosen and c.reasons
        ]
        return f"chose {self.chosen} on {self.device}" + (
            f" [{'; '.join(others)}]" if others else ""
        )

    def choice(self) -> str:
        """The first line and the row of the chosen backend, of the table that `str` returns."""
        return self._table([c for c in self.candidates if c.name == self.chosen])

    def __str__(self) -> str:
        return self._table(self.candidates)

    def _table(self, candidates: Sequence[CandidateReport]) -> str:
        how = (
            "auto; ATTNLIB_BACKEND overrides"
            if self.source == "auto"
            else f"requested by {self.source}"
        )
        lines = [f"attnlib chose {self.chosen or 'no backend'} on {self.device} [{how}]"]
        reasons = {c.reasons for c in candidates}
        if len(candidates) > 1 and len(reasons) == 1 and not self.accepted:  # such as no GPU
            candidates = [replace(candidates[0], name="all")]
        width = max((len(c.name) for c in candidates), default=0)
        for candidate in candidates:
            chosen = candidate.name == self.chosen
            status = "chosen" if chosen else candidate.status.value
            texts = (*(candidate.explain_lines if chosen else ()), *candidate.reasons)
            lines += _row(f"  {candidate.name:<{width}}  {status:<11}  ", texts)
        return "\n".join(lines)


def _row(head: str, texts: Iterable[str]) -> list[str]:
    """A row of the table: every text starts in the column after `head` and is wrapped there."""
    lines: list[str] = []
    for text in texts:
        phase = re.match(r"(prefill|decode|splits|tiles|write): +", text)
        indent = " " * len(head)
        lines += textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=indent + " " * (len(phase[0]) if phase else 0),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return [head + lines[0][len(head) :], *lines[1:]] if lines else [head.rstrip()]


def selection_error(
    spec: LayerSpec,
    report: SelectionReport,
    requested: Sequence[str],
    environment: Callable[[str], str],
) -> AttnlibError:
    """The error for a report without a choice: all reasons, and the backends that would fit.

    Args:
        spec: what the layer needs.
        report: the result of the selection.
        requested: names that the user requested; empty for auto.
        environment: name -> the versions that its availability depends on (I3); called only for a
            backend that is not available.
    """
    if not requested:
        reasons = {c.name: "; ".join(c.reasons) for c in report.candidates}
        lines = [f"  {name}: {reason}" for name, reason in reasons.items()]
        if len(lines) > 1 and len(set(reasons.values())) == 1:  # such as a device that is missing
            lines = [f"  all backends: {next(iter(reasons.values()))}"]
        table = "\n".join(lines)
        return UnsupportedConfigError(
            f"no backend supports this layer on {report.device}:\n{table}\nThe layer: {spec}",
            backend="auto",
            reasons=[reason for c in report.candidates for reason in c.reasons],
            rejections=report.rejections(),
        )
    failed = next(
        c
        for c in report.candidates
        if c.name in requested and c.status is not SelectionStatus.ACCEPTED
    )
    rejections = [r for r in report.rejections() if r.backend == failed.name]
    others = (
        f"Backends that support this spec here: {', '.join(report.accepted)}."
        if report.accepted
        else "No other backend supports this spec here."
    )
    message = (
        f"backend {failed.name!r} (from {report.source}) is {failed.status.value} on "
        f"{report.device}: {'; '.join(failed.reasons)}. {others}"
    )
    if failed.status is SelectionStatus.UNAVAILABLE:
        versions_given = any("cxx11 ABI" in reason for reason in failed.reasons)
        return BackendUnavailableError(
            message if versions_given else f"{message} {environment(failed.name)}",
            rejections=rejections,
        )
    return UnsupportedConfigError(
        message, backend=failed.name, reasons=failed.reasons, rejections=rejections
    )
