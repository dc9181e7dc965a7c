"""One run of `attnlib tune`: the loop over cases, its output and the table that it extends."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attnlib import tuning
from attnlib.bench.backends import BenchBackend, find_backends
from attnlib.bench.case import BenchCase
from attnlib.bench.measure import measure_case
from attnlib.bench.peaks import measure_peaks
from attnlib.bench.provenance import provenance
from attnlib.bench.results import Row
from attnlib.bench.results import read_document as read_results
from attnlib.bench.table import HEADER, case_lines
from attnlib.bench.timing import DeviceLostError
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import ContractError
from attnlib.selection.registry import availability, registrations
from attnlib.tuning.document import merged, read_document, write_document
from attnlib.tuning.measure import Trial, best_parameters, measure_operation
from attnlib.tuning.rank import rank_rows
from attnlib.tuning.tuner import Tuner

__all__ = ["Session", "active_table", "find_tuners"]


def find_tuners(backends: Sequence[BenchBackend], device: torch.device) -> dict[str, Tuner]:
    """Backend name -> tuner, of the registered and the given backends that are available."""
    classes = [one.backend for one in backends if not one.unavailable_reasons]
    for registration in registrations().values():
        backend, reasons = availability(registration, resolve_device(device))
        classes += [] if reasons else [backend]
    found: dict[str, Tuner] = {}
    for backend in classes:
        if backend is None or backend.get_name() in found:
            continue
        tuner = backend.tuner(device)
        if tuner is not None:
            found[backend.get_name()] = tuner
    return found


class Session:
    """One run: its start time, its table and its results so far.

    Raises:
        ContractError: the device has no name, there is no table to write, or a backend name is
            unknown.
    """

    def __init__(self, options: argparse.Namespace, info: DeviceInfo, command: str) -> None:
        chip = tuning.chip_name(info)
        if chip is None:
            raise ContractError(
                f"the driver reports no name for {info}, and a table needs the name of its chip; "
                "use --device cpu, or another GPU"
            )
        path = options.out or tuning.table_path(chip)
        if path is None:
            raise ContractError(
                "ATTNLIB_TUNING=off: there is no table to write; unset it, or name a file with "
                "--out"
            )
        self.options, self.info, self.path = options, info, Path(path)
        self._start = time.perf_counter()
        self._device = info.torch_device
        names = options.backends
        self._rank = names != ["none"]
        self._backends = find_backends(names if self._rank else [], self._device)
        self.tuners = find_tuners(self._backends, self._device)
        self._provenance = {**provenance(command, options.commit, self._device), "chip": chip}
        self._base = read_document(self.path, chip)
        self._name = f"{self._provenance['date']}, commit {self._provenance['commit']}"
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._rankings: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Print what is measured; for arguments that were found to be valid."""
        versions = ", ".join(f"{name} {self._provenance[name]}" for name in ("torch", "triton"))
        self.say(f"attnlib tune on {self.info}: {versions}; table {self.path}")
        if not self.tuners:
            self.say(f"no backend has tunable parameters on {self.info}; backends are ranked")

    def say(self, *lines: str) -> None:
        """Print and flush, so that the progress is visible."""
        print("\n".join(lines), flush=True)

    def expired(self) -> bool:
        """True if the time limit was reached."""
        limit = self.options.limit_seconds
        return limit is not None and time.perf_counter() - self._start > limit

    def tune(self, cases: Sequence[BenchCase], operations: Sequence[str]) -> None:
        """Measure the parameters of each operation on each case that the operation serves."""
        work = [
            (case, name, operation)
            for case in cases
            for name, tuner in self.tuners.items()
            for operation in tuner.operations
            if operation in operations and tuner.group(case, operation) is not None
        ]
        trials: dict[str, list[Trial]] = {name: [] for name in self.tuners}
        for number, (case, name, operation) in enumerate(work):
            if self.expired():
                self._say_not_run([f"{c.name}/{op}" for c, _, op in work[number:]])
                break
            progress = f"[{number + 1}/{len(work)}, {self._seconds()}]"
            self.say(f"{progress} {name} {operation} on {case.name}")
            seen: list[Trial] = []

            def show(trial: Trial, seen: list[Trial] = seen) -> None:
                seen.append(trial)
                self.say(_trial_line(trial, seen[0]))

            tuner = self.tuners[name]
            trials[name] += measure_operation(
                tuner,
                case,
                operation,
                self._device,
                quick=self.options.quick,
                expired=self.expired,
                on_trial=show,
            )
            self._lines[name] = tuner.table_lines(best_parameters(trials[name]), self._name)
            self._write()

    def rank_backends(self, cases: Sequence[BenchCase]) -> None:
        """Rank backends on the cases, or by results of `attnlib bench`."""
        if self.options.from_bench:
            self._add_rankings(self._rows_of_bench())
            return
        if not self._rank:
            return
        peaks, rows = measure_peaks(self._device), list[Row]()
        self.say("", HEADER)
        for number, case in enumerate(cases):
            if self.expired():
                self._say_not_run([each.name for each in cases[number:]])
                break
            try:
                rows += measure_case(case, self._backends, self._device, peaks)
            except DeviceLostError as error:
                self.say(f"{error}; measure the rest in a new process")
                break
            self.say(case_lines([row for row in rows if row.case == case.name]))
            self._add_rankings(rows)

    def _say_not_run(self, names: Sequence[str]) -> None:
        limit = self.options.limit_seconds
        self.say(f"not run, the limit of {limit:g} s was reached: {' '.join(names)}")

    def _rows_of_bench(self) -> list[Row]:
        """The rows of the result files.

        Raises:
            ContractError: a file was measured on another chip.
        """
        rows: list[Row] = []
        for file in self.options.from_bench:
            document = read_results(file)
            for run in document.runs:
                chip = run.provenance.get("gpu", "cpu")
                if chip != self._provenance["chip"]:
                    raise ContractError(
                        f"--from-bench {file} was measured on {chip!r} and this is "
                        f"{self._provenance['chip']!r}: rank on the chip itself"
                    )
            if len({row.run for row in document.rows}) > 1:
                self.say(
                    f"{file} has several runs: each class of layers is ranked over all of them"
                )
            rows += document.rows
        return rows

    def _add_rankings(self, rows: Sequence[Row]) -> None:
        self._rankings = rank_rows(rows, self._name)
        self._write()

    def _write(self) -> None:
        if not any(self._lines.values()) and not self._rankings:
            return
        keys = {name: tuner.line_key for name, tuner in self.tuners.items()}
        document = merged(
            self._base, self._name, self._provenance, self._lines, self._rankings, keys
        )
        write_document(self.path, document)
        os.environ["ATTNLIB_TUNING"] = str(self.path)  # restored by `active_table`
        tuning.clear_cache()

    def _seconds(self) -> str:
        return f"{time.perf_counter() - self._start:.0f} s"

    def finish(self) -> int:
        """Print the result; returns the exit status."""
        tuning.clear_cache()
        count = sum(map(len, self._lines.values()))
        if not count and not self._rankings:
            self.say("", f"no result, so {self.path} was not written")
            return 1
        for line in self._rankings:
            order = ", ".join(f"{name} {line['relative'][name]:.2f}" for name in line["ranking"])
            self.say(f"layers {_brief(line['layer'])}: {order}")
        self.say(
            f"wrote {count} parameter lines and {len(self._rankings)} rankings to {self.path} in "
            f"{self._seconds()}"
        )
        return 0


def _trial_line(trial: Trial, current: Trial) -> str:
    parameters = ", ".join(f"{name} {value}" for name, value in trial.parameters.items())
    if trial.us is None:
        return f"    {'':>10}  {parameters}: {trial.reason}"
    share = f"  {trial.us / current.us:.2f} x" if current.us else ""
    return f"    {trial.us:>7.1f} us  {parameters}{'  current' if trial.is_current else share}"


def _brief(layer: Mapping[str, Any]) -> str:
    words = [
        f"D {layer['head_size']}",
        f"group {layer['group_size']}",
        f"page {layer['block_size']}",
        layer["dtype"],
        *layer["features"],
    ]
    return ", ".join(words)


@contextmanager
def active_table(path: Path) -> Iterator[None]:
    """A context in which attnlib reads the table at `path`, so that backends are ranked with the
    new parameters.
    """
    before = os.environ.get("ATTNLIB_TUNING")
    os.environ["ATTNLIB_TUNING"] = str(path) if path.exists() else "off"  # until the first write
    tuning.clear_cache()
    try:
        yield
    finally:
        if before is None:
            del os.environ["ATTNLIB_TUNING"]
        else:
            os.environ["ATTNLIB_TUNING"] = before
        tuning.clear_cache()
