"""Parity: compare backends pairwise.

Every ordered pair (A, B) runs the same cases: A writes this step's keys and values into a cache, B
attends to it. The output is compared with the oracle and with the result of A attending to its own
cache. A case is unsupported if one of the two backends declares so.
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
    """The result of one ordered pair in one case.

    Attributes:
        writer, reader: names of the backends.
        case: id of the case.
        outcome: pass, fail or unsupported.
        message: the error or the reasons; "" for a pass.
        difference: largest absolute difference to the result of the writer reading its own cache;
            NaN if there is no result.
    """

    writer: str
    reader: str
    case: str
    outcome: Outcome
    message: str
    difference: float


@dataclass(frozen=True)
class ParityReport:
    """The results of all pairs.

    Attributes:
        device: the device.
        backends: names of the backends.
        cells: the result of each pair in each case.
    """

    device: str
    backends: tuple[str, ...]
    cells: tuple[ParityCell, ...]

    @property
    def passed(self) -> bool:
        """True if no cell failed and at least one passed."""
        outcomes = {cell.outcome for cell in self.cells}
        return Outcome.FAIL not in outcomes and Outcome.PASS in outcomes

    def __str__(self) -> str:
        """The matrix (rows write, columns read), followed by the failures."""
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
        legend = (
            "passed/run cases that both support; largest difference to the writer reading its own "
            "cache"
        )
        lines = [
            f"attnlib parity on {self.device}: {legend}",
            "",
            format_table(header, rows),
            *failures,
        ]
        return "\n".join([*lines, "", "PASSED" if self.passed else "FAILED"])

    def _summary(self, writer: str, reader: str) -> str:
        cells = [cell for cell in self.cells if (cell.writer, cell.reader) == (writer, reader)]
        run = [cell for cell in cells if cell.outcome is not Outcome.UNSUPPORTED]
        if not run:
            return "unsupported"
        passed = sum(cell.outcome is Outcome.PASS for cell in run)
        largest = self.largest(writer, reader)
        return f"{passed}/{len(run)}  {'no result' if largest is None else f'{largest:.1e}'}"

    def largest(self, writer: str, reader: str) -> float | None:
        """The largest difference over all cases of a pair; None if no case has a result."""
        found = [
            cell.difference for cell in self.cells if (cell.writer, cell.reader) == (writer, reader)
        ]
        return max((difference for difference in found if not math.isnan(difference)), default=None)

    def to_json(self) -> str:
        """The report as JSON; `largest` maps writer -> reader -> largest difference or null."""
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
            "version": 2,
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
    """Run every ordered pair of backends.

    Args:
        backends: names, paths or classes; None selects all backends available on the device.
        device: the device to run on; None selects the GPU if torch sees one, otherwise the CPU.
        seed: seed of all random numbers.
        on_cell: called after each cell, for progress bars.

    Raises:
        ContractError: no backend is available, or two have one name.
    """
    place = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    selected = (
        [load_backend(backend) for backend in backends]
        if backends
        else find_available_backends(place)
    )
    if not selected:
        raise ContractError(
            f"no backend is available on {place}: pass `backends`, or see `attnlib list`"
        )
    names = [backend.get_name() for backend in selected]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ContractError(
            f"{', '.join(repeated)} is given more than once: "
            "drop the repetition (every backend also reads its own cache), or give classes of "
            "different names"
        )
    cells: list[ParityCell] = []
    for writer in selected:
        base = BackendUnderTest(writer, writer.get_name(), place, seed).base_case.replace(
            needs_lse=False
        )
        for name, changes in _CASES.items():
            own: list[torch.Tensor] = []
            for reader in (writer, *(other for other in selected if other is not writer)):
                cells.append(_cell(writer, reader, name, base.replace(**changes), place, own))
                if on_cell is not None:
                    on_cell(cells[-1])
    return ParityReport(str(place), tuple(names), tuple(cells))


def _cell(
    writer: Backend,
    reader: Backend,
    name: str,
    case: Case,
    device: torch.device,
    own: list[torch.Tensor],
) -> ParityCell:
    """Run one cell. `own` holds the writer's result on its own cache, which runs first."""
    outcome, message, difference = Outcome.PASS, "", float("nan")
    try:
        actual = write_then_attend(writer, reader, case, device)
        if not own:
            own.append(actual.out.clone())
        message = compare_with_oracle(case, actual, device)
        outcome = Outcome.FAIL if message else Outcome.PASS
        difference = (
            float((actual.out.double() - own[0].double()).abs().max())
            if actual.out.numel()
            else 0.0
        )
    except UnsupportedCase as refusal:
        outcome, message = Outcome.UNSUPPORTED, str(refusal)
    except Exception as error:
        outcome, message = Outcome.FAIL, f"raised {type(error).__name__}: {error}"
    return ParityCell(writer.get_name(), reader.get_name(), name, outcome, message, difference)
