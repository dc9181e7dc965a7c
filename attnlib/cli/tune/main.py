"""`attnlib tune`: arguments, the loop over cases, and the table that grows with every one of them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attnlib import tuning
from attnlib.bench.backends import find_contenders, split_names
from attnlib.bench.case import BenchCase
from attnlib.bench.measure import DeviceLostError, measure_case
from attnlib.bench.peaks import measure_ceilings
from attnlib.bench.provenance import provenance
from attnlib.bench.results import Row
from attnlib.bench.results import read_document as read_results
from attnlib.bench.suites import SUITES
from attnlib.bench.table import HEADER, case_lines
from attnlib.cli.spec_flags import add_spec_flags
from attnlib.cli.tune.backends import rank_rows
from attnlib.cli.tune.candidates import group_of, operations
from attnlib.cli.tune.document import merged, read_document, write_document
from attnlib.cli.tune.plan import plan_cases
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import ContractError
from attnlib.ops.triton.heuristics.tile_table import OPS

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """The arguments of `attnlib tune`."""
    made = argparse.ArgumentParser(
        prog="attnlib tune",
        description="Measure tiles and backends on this chip, and write the table that auto follows. Only what passes the gate is taken.",
        epilog="A CASE is one of attnlib bench: a name, a glob, or BATCH[@KEY=VALUE,...]. Or give a spec, or --config, and --shapes q1s8k,q4k.",
    )
    made.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="what to measure (default: the quick suite on a GPU, cpu elsewhere)",
    )
    made.add_argument("--suite", choices=tuple(SUITES), help="named cases of attnlib bench")
    made.add_argument(
        "--shapes",
        metavar="BATCH,...",
        help="batches for the spec's layers, such as q1s8k,8q1s4k,q4k",
    )
    made.add_argument(
        "--ops",
        metavar="OP,...",
        help=f"tiles of which operations: {', '.join(OPS)}, or none (default: all, on a GPU)",
    )
    made.add_argument(
        "--backends",
        metavar="NAME,...",
        help="which backends to rank, or none (default: all that run here)",
    )
    made.add_argument(
        "--from-bench",
        nargs="+",
        metavar="FILE",
        help="rank backends by results of attnlib bench --json on this chip instead",
    )
    made.add_argument(
        "--device", help="cpu, cuda, cuda:1; default: a GPU where torch sees one, else the CPU"
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
        help="begin nothing after S seconds; what was measured by then is in the table",
    )
    made.add_argument("--quick", action="store_true", help="fewer shapes and tiles")
    made.add_argument("--commit", help="attnlib's commit, for a copy without history")
    add_spec_flags(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """`attnlib tune`; 0 when the table was written, 1 when nothing passed."""
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = parser().parse_args(arguments)
    info = resolve_device(options.device)
    if info.is_hypothetical or (info.type == "cuda" and not torch.cuda.is_available()):
        raise ContractError(
            f"--device {options.device} is not here: measuring needs the device itself; use --device cpu, or run where it is"
        )
    session = _Session(options, info, "attnlib tune " + shlex.join(arguments))
    ops = _operations(options, info)
    cases, left_out = ([], []) if options.from_bench and not ops else plan_cases(options, info.type)
    for line in left_out:
        session.say(f"left out: {line}")
    with _following(session.path):
        if ops:
            session.tune_tiles(cases, ops)
        session.rank_backends(cases)
    return session.finish()


def _operations(options: argparse.Namespace, info: DeviceInfo) -> tuple[str, ...]:
    """The operations whose tiles are measured.

    Raises:
        ContractError: an unknown one, or any at all where there is no GPU.
    """
    if options.ops is None:
        return tuple(OPS) if info.type == "cuda" and not options.from_bench else ()
    wanted = () if options.ops == "none" else tuple(split_names(options.ops))
    if strangers := [op for op in wanted if op not in OPS]:
        raise ContractError(f"--ops {strangers[0]} is not known; write {', '.join(OPS)}, or none")
    if wanted and info.type != "cuda":
        raise ContractError(
            f"--ops {options.ops}: tiles are measured on a GPU and this is {info}; leave --ops out to rank backends here"
        )
    return wanted


class _Session:
    """One run: its clock, its table and what was found so far."""

    def __init__(self, options: argparse.Namespace, info: DeviceInfo, command: str) -> None:
        chip = tuning.chip_name(info)
        if chip is None:
            raise ContractError(
                f"the driver does not name {info}, so a table could not say which chip it is for; use --device cpu, or another GPU"
            )
        path = options.out or tuning.table_path(chip)
        if path is None:
            raise ContractError(
                "ATTNLIB_TUNING=off: there is no table to write; unset it, or name a file by --out"
            )
        self.options, self.info, self.path = options, info, Path(path)
        self._begin, self._facts = (
            time.perf_counter(),
            provenance(command, options.commit, info.torch_device),
        )
        self._facts["chip"] = chip
        self._base = read_document(self.path, chip)
        self._name = f"{self._facts['date']}, commit {self._facts['commit']}"
        self._tiles: list[dict[str, Any]] = []
        self._ranks: list[dict[str, Any]] = []
        self.say(
            f"attnlib tune on {info}: torch {self._facts['torch']}, triton {self._facts['triton']}; table {self.path}"
        )
        if info.type != "cuda":
            self.say("tiles are measured on a GPU only; here backends are ranked")

    def say(self, *lines: str) -> None:
        """Print at once: whoever waits, or stops the run, sees how far it is."""
        print("\n".join(lines), flush=True)

    def expired(self) -> bool:
        """Whether the time that was given is over."""
        limit = self.options.limit_seconds
        return limit is not None and time.perf_counter() - self._begin > limit

    def tune_tiles(self, cases: Sequence[BenchCase], ops: tuple[str, ...]) -> None:
        """Tiles of each operation on each case."""
        from attnlib.cli.tune.tiles import Trial, best_entries, measure_tiles
        from attnlib.ops.triton.heuristics.device import limits_of

        device = self.info.torch_device
        limits, trials = limits_of(torch.empty(0, device=device)), list[Trial]()
        work = [(case, op) for case in cases for op in operations(case, limits, ops)]
        for number, (case, op) in enumerate(work):
            if self.expired():
                self.say(
                    f"not run, the limit of {self.options.limit_seconds:g} s was reached: {' '.join(f'{c.name}/{o}' for c, o in work[number:])}"
                )
                break
            self.say(f"[{number + 1}/{len(work)}, {self._seconds()}] tiles of {op} on {case.name}")
            trials += measure_tiles(
                case,
                op,
                group_of(case, op, limits),
                device,
                quick=self.options.quick,
                expired=self.expired,
                report=self.say,
            )
            self._tiles = best_entries(trials, self._name)
            self._write()

    def rank_backends(self, cases: Sequence[BenchCase]) -> None:
        """Backends on each case, or as results of `attnlib bench` have them."""
        if self.options.from_bench:
            self._rank(self._rows_of_bench())
            return
        names = split_names(self.options.backends) if self.options.backends else None
        if names == ["none"]:
            return
        device = self.info.torch_device
        contenders, ceilings, rows = (
            find_contenders(names, device),
            measure_ceilings(device),
            list[Row](),
        )
        self.say("", HEADER)
        for number, case in enumerate(cases):
            if self.expired():
                self.say(
                    f"not run, the limit of {self.options.limit_seconds:g} s was reached: {' '.join(each.name for each in cases[number:])}"
                )
                break
            try:
                rows += measure_case(case, contenders, device, ceilings)
            except DeviceLostError as error:
                self.say(f"{error}; measure the rest in a new process")
                break
            self.say(case_lines([row for row in rows if row.case == case.name]))
            self._rank(rows)

    def _rows_of_bench(self) -> list[Row]:
        """Rows of result files, all of this chip."""
        rows: list[Row] = []
        for file in self.options.from_bench:
            document = read_results(file)
            for run in document.runs:
                chip = run.provenance.get("gpu", "cpu")
                if chip != self._facts["chip"]:
                    raise ContractError(
                        f"--from-bench {file} was measured on {chip!r} and this is {self._facts['chip']!r}: rank on the chip itself"
                    )
            if len({row.run for row in document.rows}) > 1:
                self.say(
                    f"{file} holds several runs: each kind of layer is ranked over all of them"
                )
            rows += document.rows
        return rows

    def _rank(self, rows: Sequence[Row]) -> None:
        self._ranks = rank_rows(rows, self._name)
        self._write()

    def _write(self) -> None:
        if self._tiles or self._ranks:
            write_document(
                self.path, merged(self._base, self._name, self._facts, self._tiles, self._ranks)
            )
            os.environ["ATTNLIB_TUNING"] = str(self.path)  # `_following` puts it back
            tuning.forget()

    def _seconds(self) -> str:
        return f"{time.perf_counter() - self._begin:.0f} s"

    def finish(self) -> int:
        """Say what came of it."""
        tuning.forget()
        if not self._tiles and not self._ranks:
            self.say("", f"nothing passed, so {self.path} was not written")
            return 1
        for line in self._ranks:
            order = ", ".join(f"{name} {line['relative'][name]:.2f}" for name in line["ranking"])
            self.say(f"layers {_brief(line['layer'])}: {order}")
        self.say(
            f"wrote {len(self._tiles)} tiles and {len(self._ranks)} rankings to {self.path} in {self._seconds()}"
        )
        return 0


def _brief(layer: dict[str, Any]) -> str:
    told = [
        f"D {layer['head_size']}",
        f"group {layer['group_size']}",
        f"page {layer['block_size']}",
        layer["dtype"],
        *layer["features"],
    ]
    return ", ".join(told)


@contextmanager
def _following(path: Path) -> Iterator[None]:
    """Within, the table that is being written is the one that counts, so that backends are ranked with the tiles found before."""
    before = os.environ.get("ATTNLIB_TUNING")
    os.environ["ATTNLIB_TUNING"] = (
        str(path) if path.exists() else "off"
    )  # until the first lines are written
    tuning.forget()
    try:
        yield
    finally:
        if before is None:
            del os.environ["ATTNLIB_TUNING"]
        else:
            os.environ["ATTNLIB_TUNING"] = before
        tuning.forget()
