"""Parity: compare backends pairwise.

Every ordered pair (A, B) runs the same calls (`pair_cases`): A writes this step's keys and values
into a cache, B attends to it. The cache is compared with the one that the suite writes, output and
LSE with the oracle, and the output with the result of A attending to its own cache. A call is
unsupported if one of the two backends declares so.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.errors import ContractError
from attnlib.testing.backend_under_test import load_backend, refuse_unavailable
from attnlib.testing.conformance import find_available_backends
from attnlib.testing.outcome import Outcome
from attnlib.testing.pair_cases import CALL_NAMES, PairCase
from attnlib.testing.pair_run import Pair, ParityCell
from attnlib.testing.report import format_table

__all__ = ["ParityCell", "ParityReport", "make_pairs", "run_parity"]

Backend = type[AttentionBackend]
PairCall = tuple[Pair, "PairCase | ContractError"]


@dataclass(frozen=True)
class ParityReport:
    """The results of all pairs.

    Attributes:
        device: the device.
        backends: names of the backends.
        cells: the result of each pair in each call.
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
            f"FAIL {cell.writer} writes, {cell.reader} reads, {cell.case}: {cell.message}\n"
            f"     reproduce: {cell.reproduce}"
            for cell in self.cells
            if cell.outcome is Outcome.FAIL
        ]
        legend = (
            "passed/run calls that both support; largest difference to the writer reading its own "
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
        """The largest difference over all calls of a pair; None if no call has a result."""
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
            "version": 3,
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
    only: str | None = None,
    on_cell: Callable[[ParityCell], None] | None = None,
) -> ParityReport:
    """Run every ordered pair of backends.

    Args:
        backends: names, paths or classes; None selects all backends available on the device.
        device: the device to run on; None selects the GPU if torch sees one, otherwise the CPU.
        seed: seed of all random numbers.
        only: comma-separated names of calls (`pair_cases`), with * and ?; None selects all.
        on_cell: called after each cell, for progress bars.

    Raises:
        ContractError: no backend is available, two have one name, or `only` selects no call.
        BackendUnavailableError: a named backend cannot run on the device.
    """
    cells: list[ParityCell] = []
    selected = make_pairs(backends, device=device, seed=seed, only=only)
    for pair, case in selected:
        cells.append(pair.run(case))
        if on_cell is not None:
            on_cell(cells[-1])
    names = dict.fromkeys(pair.writer.get_name() for pair, _ in selected)
    return ParityReport(str(selected[0][0].device), tuple(names), tuple(cells))


def make_pairs(
    backends: Sequence[str | Backend] | None = None,
    against: Sequence[str | Backend] | None = None,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    only: str | None = None,
) -> list[PairCall]:
    """The calls of ordered pairs: of each backend with itself and, in both directions, with others.

    Args:
        backends, device, seed, only: as in `run_parity`.
        against: the others: names, paths or classes, or "all" for every backend that is available
            and all of `backends`. None is `backends`.

    Raises:
        ContractError, BackendUnavailableError: as in `run_parity`.
    """
    place = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    own = _named(backends, place) if backends else _available(place)
    if not own:
        raise ContractError(
            f"no backend is available on {place}: pass `backends`, or see `attnlib list`"
        )
    everything = own | _others(own, against, place)
    for part in only.split(",") if only else ():
        if not any(fnmatch.fnmatchcase(name, part.strip()) for name in CALL_NAMES):
            raise ContractError(f"no call matches {part!r}: the calls are {', '.join(CALL_NAMES)}")
    selected = [
        (pair, case)
        for writer, (writer_label, writing) in everything.items()
        for reader, (reader_label, reading) in everything.items()
        if writer in own or reader in own
        for pair in [Pair(writing, reading, place, seed, (writer_label, reader_label))]
        for case in pair.cases(only)
    ]
    return _grouped(selected)


def _named(
    backends: Sequence[str | Backend], device: torch.device
) -> dict[str, tuple[str, Backend]]:
    """Name -> the backend as the caller named it, and its class."""
    loaded = [(backend, load_backend(backend)) for backend in backends]
    for _, backend in loaded:
        refuse_unavailable(backend, device)
    names = [backend.get_name() for _, backend in loaded]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ContractError(
            f"{', '.join(repeated)} is given more than once: "
            "drop the repetition (every backend also reads its own cache), or give classes of "
            "different names"
        )
    return {found.get_name(): (_label(given), found) for given, found in loaded}


def _available(device: torch.device) -> dict[str, tuple[str, Backend]]:
    return {
        backend.get_name(): (backend.get_name(), backend)
        for backend in find_available_backends(device)
    }


def _label(backend: str | Backend) -> str:
    """What names a backend on the command line."""
    return backend if isinstance(backend, str) else ":".join(backend.full_cls_name())


def _others(
    own: dict[str, tuple[str, Backend]],
    against: Sequence[str | Backend] | None,
    device: torch.device,
) -> dict[str, tuple[str, Backend]]:
    """The backends of `against` that are not in `own`."""
    named = [backend for backend in against or () if backend != "all"]
    found = _named(named, device)
    if against and "all" in against:
        found = _available(device) | found
    different = [name for name in found if name in own and found[name][1] is not own[name][1]]
    if different:
        raise ContractError(
            f"{', '.join(different)} names two classes: give classes of different names"
        )
    return {name: backend for name, backend in found.items() if name not in own}


def _grouped(selected: list[PairCall]) -> list[PairCall]:
    """The calls of each writer by name, so that its result on its own cache is computed once."""
    writers = list(dict.fromkeys(pair.writer for pair, _ in selected))
    names = {name: index for index, name in enumerate(CALL_NAMES)}

    def place(call: PairCall) -> tuple[int, int]:
        pair, case = call
        return writers.index(pair.writer), names[case.name] if isinstance(case, PairCase) else -1

    return sorted(selected, key=place)
