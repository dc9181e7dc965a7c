"""Do these backends compute the same? A matrix: who writes, who reads, and how far apart the results are.

Every ordered pair runs the same cases: A writes this step's keys into a cache, B attends to it. Each cell is held
against the oracle (is it right?) and against the first backend's own result (how far apart?); a pair is refused where
one of the two declares that it cannot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.errors import ContractError
from attnlib.testing.backend_under_test import BackendUnderTest, load_backend
from attnlib.testing.case import Case
from attnlib.testing.conformance import find_available_backends
from attnlib.testing.outcome import Outcome, UnsupportedCase
from attnlib.testing.report import format_table
from attnlib.testing.runner import compare_with_oracle, write_then_attend

__all__ = ["ParityCell", "ParityReport", "run_parity"]

Backend = type[AttentionBackend]

_CASES: dict[str, dict[str, object]] = {
    "decode": {"batch": "decode_long"},
    "prefill": {"batch": "prefill"},
    "mixed": {"batch": "mixed"},
    "window": {"batch": "mixed", "sliding_window": 11},
    "soft_cap": {"batch": "mixed", "logits_soft_cap": 2.0},
    "sinks": {"batch": "mixed", "sinks": True},
    "alibi": {"batch": "mixed", "alibi": True},
    "HND": {"batch": "ragged", "layout": "HND"},
    "fp8": {"batch": "mixed", "kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.125},
}


@dataclass(frozen=True)
class ParityCell:
    """One ordered pair in one case.

    Attributes:
        writer, reader: names; case: its id.
        outcome: pass, fail or refused; message: why.
        difference: largest difference to the result of the writer reading its own writing; nan when refused.
    """

    writer: str
    reader: str
    case: str
    outcome: Outcome
    message: str
    difference: float


@dataclass(frozen=True)
class ParityReport:
    """All cells, and on what they were run."""

    device: str
    backends: tuple[str, ...]
    cells: tuple[ParityCell, ...]

    @property
    def passed(self) -> bool:
        """No cell failed, at least one passed."""
        outcomes = {cell.outcome for cell in self.cells}
        return Outcome.FAIL not in outcomes and Outcome.PASS in outcomes

    def __str__(self) -> str:
        """The matrix (rows write, columns read), then every failure."""
        header = ("writes \\ reads", *self.backends)
        rows = [
            (writer, *(self._summary(writer, reader) for reader in self.backends))
            for writer in self.backends
        ]
        failures = [
            f"FAIL {cell.writer} writes, {cell.reader} reads, {cell.case}: {cell.message}"
            for cell in self.cells
            if cell.outcome is Outcome.FAIL
        ]
        legend = "passed/run of the cases that both accept; largest difference to the writer's own result"
        parts = [
            f"attnlib parity on {self.device}: {legend}",
            "",
            format_table(header, rows),
            *failures,
        ]
        return "\n".join([*parts, "", "PASSED" if self.passed else "FAILED"])

    def _summary(self, writer: str, reader: str) -> str:
        cells = [cell for cell in self.cells if (cell.writer, cell.reader) == (writer, reader)]
        run = [cell for cell in cells if cell.outcome is not Outcome.UNSUPPORTED]
        if not run:
            return "refused"
        passed = sum(cell.outcome is Outcome.PASS for cell in run)
        largest = self.largest(writer, reader)
        return f"{passed}/{len(run)}  {'no result' if largest is None else f'{largest:.1e}'}"

    def largest(self, writer: str, reader: str) -> float | None:
        """The largest difference between the reader's and the writer's own results over all cases; None when no case gave a result."""
        found = [
            cell.difference for cell in self.cells if (cell.writer, cell.reader) == (writer, reader)
        ]
        return max((difference for difference in found if not math.isnan(difference)), default=None)

    def to_json(self) -> str:
        """Everything, with stable keys; `largest` is the matrix, writer -> reader -> difference or null."""
        cells = [
            {
                **asdict(cell),
                "outcome": cell.outcome.value,
                "difference": None if math.isnan(cell.difference) else cell.difference,
            }
            for cell in self.cells
        ]
        matrix = {
            writer: {reader: self.largest(writer, reader) for reader in self.backends}
            for writer in self.backends
        }
        data = {
            "version": 1,
            "device": self.device,
            "backends": list(self.backends),
            "passed": self.passed,
            "largest": matrix,
        }
        return json.dumps({**data, "cells": cells}, indent=1)


def run_parity(
    backends: Sequence[str | Backend] | None = None,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    on_cell: Callable[[ParityCell], None] | None = None,
) -> ParityReport:
    """Run every ordered pair.

    Args:
        backends: names, paths or classes; None means everything that can run on the device here.
        device: None means a GPU where torch sees one, else the CPU.
        on_cell: called after every cell, for progress bars.

    Raises:
        ContractError: no backend to compare.
    """
    place = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    chosen = (
        [load_backend(backend) for backend in backends]
        if backends
        else find_available_backends(place)
    )
    if not chosen:
        raise ContractError(
            f"no backend can run on {place}: name some, or see `attnlib list` for what is missing"
        )
    cells: list[ParityCell] = []
    for writer in chosen:
        base = BackendUnderTest(writer, writer.get_name(), place, seed).base_case.replace(
            needs_lse=False
        )
        for name, changes in _CASES.items():
            own: list[torch.Tensor] = []
            for reader in (writer, *(other for other in chosen if other is not writer)):
                cells.append(_cell(writer, reader, name, base.replace(**changes), place, own))
                if on_cell is not None:
                    on_cell(cells[-1])
    return ParityReport(str(place), tuple(backend.get_name() for backend in chosen), tuple(cells))


def _cell(
    writer: Backend,
    reader: Backend,
    name: str,
    case: Case,
    device: torch.device,
    own: list[torch.Tensor],
) -> ParityCell:
    """Run one cell; `own` keeps the writer's own result, which comes first."""
    outcome, message, difference = Outcome.PASS, "", float("nan")
    try:
        seen = write_then_attend(writer, reader, case, device)
        if not own:
            own.append(seen.out.clone())
        message = compare_with_oracle(case, seen, device)
        outcome = Outcome.FAIL if message else Outcome.PASS
        difference = (
            float((seen.out.double() - own[0].double()).abs().max()) if seen.out.numel() else 0.0
        )
    except UnsupportedCase as refusal:
        outcome, message = Outcome.UNSUPPORTED, str(refusal)
    except Exception as error:
        outcome, message = Outcome.FAIL, f"raised {type(error).__name__}: {error}"
    return ParityCell(writer.get_name(), reader.get_name(), name, outcome, message, difference)
