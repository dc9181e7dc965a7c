"""`attnlib bench`: the loop over cases, and the result file, which is written after every case."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from attnlib.bench.arguments import parser
from attnlib.bench.backends import BenchBackend, find_backends, unavailable_backends
from attnlib.bench.case import BenchCase
from attnlib.bench.compile_first import call_once, compile_first
from attnlib.bench.measure import measure_case
from attnlib.bench.peaks import Peaks, measure_peaks
from attnlib.bench.provenance import provenance
from attnlib.bench.results import Document, Row, Run, merge, read_document, write_document
from attnlib.bench.runner import unmeasured
from attnlib.bench.solutions import write_solutions
from attnlib.bench.state_case import AnyCase, StateCase
from attnlib.bench.suites import TARGETS, choose_cases
from attnlib.bench.table import HEADER, LEGEND, case_lines, heading, kernel_lines, summary_line
from attnlib.bench.targets import target_lines
from attnlib.bench.timing import DeviceLostError, device_works
from attnlib.bench.workload_case import workload_cases
from attnlib.device import resolve_device
from attnlib.errors import ContractError

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """`attnlib bench`; returns the exit status."""
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = parser().parse_args(arguments)
    if options.figures:
        _require_matplotlib()
    if options.from_json:
        return _show(options)
    if options.solutions:
        return _write_solutions(options)
    device = resolve_device(options.device)
    if options.workloads:
        cases: list[AnyCase] = [*_workload_cases(options)]
    else:
        default = "anchors" if device.type == "cuda" else "cpu"
        cases = choose_cases(options.cases, options.suite, default, options.block_size)
    _refuse_figures(options, any(isinstance(case, StateCase) for case in cases))
    if options.list:
        for case in cases:
            targets = "".join(f" · {target}" for target in TARGETS.get(case.name, ()))
            print(f"{case.name:<30} {case.kind:<8} {_brief(case)} · {case.shape}{targets}")
        return 0
    backends = find_backends(options.backends, device.torch_device)
    if not backends:
        raise ContractError(
            f"no backend can run on {device}: `attnlib list` shows the reasons; --backends names "
            "one explicitly"
        )
    if options.part is not None:
        return call_once(options, cases[options.part], backends, device.torch_device)
    return _run(options, cases, backends, device.torch_device, arguments)


def _refuse_figures(options: argparse.Namespace, has_states: bool) -> None:
    if options.figures and has_states:
        raise ContractError(
            "--figures draws attention layers: leave it out, or measure state layers in another run"
        )


def _workload_cases(options: argparse.Namespace) -> list[BenchCase]:
    if options.suite:
        raise ContractError("--suite and --workloads both choose the cases: pass one of them")
    cases, left_out = workload_cases(Path(options.workloads), options.cases, options.block_size)
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    return cases


def _write_solutions(options: argparse.Namespace) -> int:
    if not options.workloads:
        raise ContractError("--solutions needs --workloads TRACE_SET, which has the definitions")
    written, left_out = write_solutions(Path(options.workloads), Path(options.solutions))
    _say(*(f"wrote {path}" for path in written), *(f"left out: {line}" for line in left_out))
    return 0


def _brief(case: AnyCase) -> str:
    batch = case.batch
    if len(str(batch)) <= 40:
        return str(batch)
    return f"{batch.num_reqs} requests of {min(batch.seq_lens)} to {max(batch.seq_lens)} keys"


def _run(
    options: argparse.Namespace,
    cases: list[AnyCase],
    backends: list[BenchBackend],
    device: torch.device,
    arguments: list[str],
) -> int:
    """Measure case by case; print and write every case before the next one starts."""
    begin = time.perf_counter()
    if options.compile_jobs:
        _say(compile_first(arguments, len(cases), options.compile_jobs))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    facts = provenance("attnlib bench " + shlex.join(arguments), options.commit, device)
    peaks = measure_peaks(device)
    run = Run(facts, dict(peaks.to_json()))
    if facts["environment"]:
        _say(
            "environment: "
            + ", ".join(f"{name}={value}" for name, value in facts["environment"].items())
        )
    unavailable = (
        []
        if options.backends
        else [
            f"unavailable: {one.label} ({'; '.join(one.unavailable_reasons)})"
            for one in unavailable_backends(device)
        ]
    )
    _say(
        heading(run),
        f"backends: {', '.join(one.label for one in backends)}",
        *unavailable,
        LEGEND,
        "",
        HEADER,
    )
    rows: list[Row] = []
    lost = ""
    for number, case in enumerate(cases):
        elapsed = time.perf_counter() - begin
        late = options.limit_seconds is not None and elapsed > options.limit_seconds
        reason = lost or (f"the limit of {options.limit_seconds:g} s was reached" if late else "")
        if reason:
            found = [unmeasured(case, one.label, "not run", reason) for one in backends]
        else:
            print(
                f"[{number + 1}/{len(cases)}, {elapsed:.0f} s] {case.name}",
                file=sys.stderr,
                flush=True,
            )
            found, lost = _measure(case, backends, device, peaks, options)
            _say(case_lines(found))
        rows += found
        if options.json:
            write_document(Document((run,), tuple(rows)), options.json)
    return _finish(options, Document((run,), tuple(rows)), time.perf_counter() - begin)


def _measure(
    case: AnyCase,
    backends: list[BenchBackend],
    device: torch.device,
    peaks: Peaks,
    options: argparse.Namespace,
) -> tuple[list[Row], str]:
    """(rows, why nothing more can be measured in this process, or "")."""
    try:
        graphs = device.type == "cuda" and not options.eager
        found = measure_case(
            case,
            backends,
            device,
            peaks,
            graphs=graphs,
            check=not options.no_check,
            kernels_only=options.kernels_only,
        )
        return found, ""
    except DeviceLostError as error:
        failed = [unmeasured(case, one.label, "failed", str(error)) for one in backends]
        return failed, f"{error}; measure the rest in a new process"
    except Exception as error:  # the other cases go on
        reason = f"{type(error).__name__}: {error}"
        failed = [unmeasured(case, one.label, "failed", reason) for one in backends]
        if device_works(device):
            return failed, ""
        lost = f"the device failed after {case.name} ({reason})"
        return failed, f"{lost}; measure the rest in a new process"


def _finish(options: argparse.Namespace, document: Document, seconds: float) -> int:
    left = list(dict.fromkeys(row.case for row in document.rows if row.status == "not run"))
    if left:
        reason = next(row.reason for row in document.rows if row.status == "not run")
        _say("", f"not run ({reason}): {' '.join(left)}")
    targets = target_lines(document.rows, TARGETS)
    _say("", *kernel_lines(document.rows), *targets, summary_line(document.rows, seconds))
    _draw(options, document)
    return 1 if any(row.status in ("wrong", "failed") for row in document.rows) else 0


def _show(options: argparse.Namespace) -> int:
    """Print, merge and plot results of earlier runs."""
    chosen = ("cases", "suite", "backends", "workloads", "solutions", "block_size")
    if given := [name.replace("_", "-") for name in chosen if getattr(options, name)]:
        raise ContractError(f"--from-json measures nothing: leave out {', '.join(given)}")
    document = merge([read_document(path) for path in options.from_json])
    _refuse_figures(options, any("work" in row.settings for row in document.rows))
    for index, run in enumerate(document.runs):
        mine = [row for row in document.rows if row.run == index]
        if not mine:
            continue
        _say(heading(run), HEADER)
        for name in dict.fromkeys(row.case for row in mine):
            _say(case_lines([row for row in mine if row.case == name]))
    if targets := target_lines(document.rows, TARGETS):
        _say("", *targets)
    if options.json:
        write_document(_without_empty_runs(document), options.json)
    _draw(options, document)
    return 0


def _without_empty_runs(document: Document) -> Document:
    used = sorted({row.run for row in document.rows})
    rows = tuple(replace(row, run=used.index(row.run)) for row in document.rows)
    return Document(tuple(document.runs[index] for index in used), rows)


def _draw(options: argparse.Namespace, document: Document) -> None:
    if options.figures:
        from attnlib.bench.figures import draw_figures

        for path in draw_figures(document, options.figures):
            _say(f"wrote {path}")


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401  # only checks that it is there, before anything is measured
    except ImportError as error:
        raise ContractError(
            f"--figures needs matplotlib ({error}): pip install 'attnlib[bench]', or write --json "
            "and plot elsewhere"
        ) from None


def _say(*lines: str) -> None:
    print("\n".join(lines), flush=True)
