"""`attnlib tune`: arguments, the loop over cases, and a table that is written after each case."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attnlib import tuning
from attnlib.bench.backends import BenchBackend, find_backends, split_names
from attnlib.bench.case import BenchCase
from attnlib.bench.measure import DeviceLostError, measure_case
from attnlib.bench.peaks import measure_peaks
from attnlib.bench.provenance import provenance
from attnlib.bench.results import Row
from attnlib.bench.results import read_document as read_results
from attnlib.bench.suites import SUITES
from attnlib.bench.table import HEADER, case_lines
from attnlib.cli.spec_flags import add_spec_flags
from attnlib.cli.tune.plan import plan_cases
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import ContractError
from attnlib.selection.registry import availability, registrations
from attnlib.tuning.document import merged, read_document, write_document
from attnlib.tuning.measure import Trial, best_parameters, measure_operation, rank_rows
from attnlib.tuning.tuner import Tuner

__all__ = ["find_tuners", "main", "parser"]


def parser() -> argparse.ArgumentParser:
    """The arguments of `attnlib tune`."""
    made = argparse.ArgumentParser(
        prog="attnlib tune",
        description="Measure backends and their tunable parameters on this chip, and write the "
        "table that "
        "automatic selection uses. Results with a wrong output do not count.",
        epilog="A CASE is one of attnlib bench: a name, a glob, or BATCH[@KEY=VALUE,...]. Or give "
        "a spec, or "
        "--config, and --shapes q1s8k,q4k.",
    )
    made.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="what to measure (default: the quick suite on a GPU, the cpu suite elsewhere)",
    )
    made.add_argument("--suite", choices=tuple(SUITES), help="named cases of attnlib bench")
    made.add_argument(
        "--shapes",
        metavar="BATCH,...",
        help="batches for the layers of the spec, such as q1s8k,8q1s4k,q4k",
    )
    made.add_argument(
        "--ops",
        metavar="OP,...",
        help="operations whose parameters to measure, such as decode,hopper_prefill, or none "
        "(default: all operations that backends can tune on this device)",
    )
    made.add_argument(
        "--backends",
        metavar="NAME,...",
        help="backends to rank, or none (default: all that can run here)",
    )
    made.add_argument(
        "--from-bench",
        nargs="+",
        metavar="FILE",
        help="rank backends by results of attnlib bench --json on this chip instead of measuring",
    )
    made.add_argument(
        "--device", help="cpu, cuda, cuda:1 (default: a GPU if torch has one, else the CPU)"
    )
    made.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the table (default: the one that attnlib reads, ATTNLIB_TUNING or the user's cache)",
    )
    made.add_argument(
        "--limit-seconds",
        type=float,
        metavar="S",
        help="start nothing after S seconds; the table holds what was measured by then",
    )
    made.add_argument("--quick", action="store_true", help="fewer shapes and candidates")
    made.add_argument("--commit", help="attnlib's commit, for a copy without history")
    add_spec_flags(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """`attnlib tune`; 0 if the table was written, 1 if there is no result."""
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = parser().parse_args(arguments)
    info = resolve_device(options.device)
    if info.is_hypothetical or (info.type == "cuda" and not torch.cuda.is_available()):
        raise ContractError(
            f"--device {options.device} is not available: measuring needs the device; use --device "
            "cpu, or run "
            "on a machine that has it"
        )
    session = _Session(options, info, "attnlib tune " + shlex.join(arguments))
    operations = _operations(options, info, session.tuners)
    needs_cases = bool(operations) or not options.from_bench
    cases, left_out = plan_cases(options, info.type) if needs_cases else ([], [])
    for line in left_out:
        session.say(f"left out: {line}")
    with _active_table(session.path):
        if operations:
            session.tune(cases, operations)
        session.rank_backends(cases)
    return session.finish()


def find_tuners(backends: Sequence[BenchBackend], device: torch.device) -> dict[str, Tuner]:
    """Backend name -> tuner, for the available registered backends and the given ones that have one
    on the device.
    """
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


def _operations(
    options: argparse.Namespace, info: DeviceInfo, tuners: Mapping[str, Tuner]
) -> tuple[str, ...]:
    """The operations to measure.

    Raises:
        ContractError: no backend can tune the operation on this device.
    """
    known = tuple(dict.fromkeys(name for tuner in tuners.values() for name in tuner.operations))
    if options.ops is None:
        return () if options.from_bench else known
    names = () if options.ops == "none" else tuple(split_names(options.ops))
    for name in names:
        if not known:
            raise ContractError(
                f"--ops {options.ops}: no backend has tunable operations on {info} (triton has "
                "them on a "
                "GPU); leave --ops out to rank backends"
            )
        if name not in known:
            raise ContractError(f"--ops {name} is unknown; write {', '.join(known)}, or none")
    return names


class _Session:
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
                "use "
                "--device cpu, or another GPU"
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
        names = split_names(options.backends) if options.backends else None
        self._rank = names != ["none"]
        self._backends = find_backends(names if self._rank else [], self._device)
        self.tuners = find_tuners(self._backends, self._device)
        self._provenance = {**provenance(command, options.commit, self._device), "chip": chip}
        self._base = read_document(self.path, chip)
        self._name = f"{self._provenance['date']}, commit {self._provenance['commit']}"
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._rankings: list[dict[str, Any]] = []
        versions = ", ".join(f"{name} {self._provenance[name]}" for name in ("torch", "triton"))
        self.say(f"attnlib tune on {info}: {versions}; table {self.path}")
        if not self.tuners:
            self.say(f"no backend has tunable parameters on {info}; backends are ranked")

    def say(self, *lines: str) -> None:
        """Print and flush, so that the progress is visible."""
        print("\n".join(lines), flush=True)

    def expired(self) -> bool:
        """True if the time limit was reached."""
        limit = self.options.limit_seconds
        return limit is not None and time.perf_counter() - self._start > limit

    def tune(self, cases: Sequence[BenchCase], operations: Sequence[str]) -> None:
        """Measure the parameters of each operation of each backend on each case that the operation
        serves.
        """
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
        os.environ["ATTNLIB_TUNING"] = str(self.path)  # restored by `_active_table`
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
def _active_table(path: Path) -> Iterator[None]:
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
