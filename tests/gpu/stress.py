"""Stress a GPU: long random runs, and the quick conformance suite under compute-sanitizer.

    python tests/gpu/stress.py --out results        # everything
    python tests/gpu/stress.py --only memcheck initcheck

Each step writes its output to OUT/<step>*.txt; `stress.txt` summarizes them with hardware, versions
and commit. The suite runs once without the tools, so that Triton's cache holds its kernels. Then
the cases of every tool are dealt to processes of about PART_SIZE cases, and --jobs processes run at
the same time, since each keeps one core busy and leaves most of the GPU idle. The exit code is 0 if
every step is complete and without errors; the summary counts the cases of an incomplete one.

memcheck and initcheck run without torch's caching allocator: each tensor is an allocation of its
own, so that an access past its end and a read of memory that nobody wrote are found. CUDA graphs
cannot be captured then; their checks run in the step `memcheck-graphs`. Left out under the tools
are checks of host code that start processes or count launches, and pools of 2^31 elements, whose
memory the tools cannot shadow in reasonable time. racecheck runs on the portable kernels: it does
not follow the mbarriers by which the warps of the Gluon kernels exchange data, and reports each
exchange as a hazard. initcheck does not follow the stores of TMA either, by which cuBLAS writes its
results: reads in kernels of PyTorch are counted apart, and those in kernels of attnlib are errors.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

KERNEL_CHECKS = "V2,F1,W2,K3,S1,S2,N1,N2,N3,N4,L1,L2,L3,Q3,O2,F2,F3,K4,K6,D2"
"""Checks that launch kernels and need neither graphs, other processes nor very large pools."""
TOOL = "--print-limit 20 --error-exitcode 99 --tool"
INITCHECK = "--print-limit 10000000 --show-backtrace no --tool initcheck"
FOREIGN = "reads in kernels of PyTorch"


PART_SIZE = 24
"""Cases per process: many enough that starting a process under a tool takes less than they do."""


@dataclass(frozen=True, eq=False)
class Step:
    """One command, or one that runs the quick suite in parts.

    Attributes:
        name: name of the step and of its output files.
        command: arguments after the interpreter; with `{}` for the filter of a part.
        tool: arguments of compute-sanitizer; empty for a run without it.
        backend: the backend whose cases are dealt to the parts; empty for a single command.
        environment: variables of the step.
    """

    name: str
    command: str
    tool: str = ""
    backend: str = ""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Part:
    """One process of a step.

    Attributes:
        step: the step.
        file: its output.
        command: arguments after the interpreter.
        cases: number of cases of the suite; 0 for other commands.
    """

    step: Step
    file: Path
    command: str
    cases: int = 0


SEPARATE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
PORTABLE = "benchmarks/gpu/variants.py:Portable"
VERIFY = "-m attnlib verify {} --quick --jobs {} --only {}"
PARTS = "-m attnlib verify {} --quick --jobs 1 --only {{}}"
STEPS = (
    Step("stress", "-m pytest -q -rs -m gpu -p no:cacheprovider tests/gpu/test_stress.py"),
    Step("memcheck-graphs", VERIFY.format("triton", 1, "G1,G3,G4"), f"{TOOL} memcheck"),
    Step("racecheck-portable", PARTS.format(PORTABLE), f"{TOOL} racecheck", PORTABLE),
    Step("memcheck", PARTS.format("triton"), f"{TOOL} memcheck", "triton", SEPARATE),
    Step("memcheck-portable", PARTS.format(PORTABLE), f"{TOOL} memcheck", PORTABLE, SEPARATE),
    Step("initcheck", PARTS.format("triton"), INITCHECK, "triton", SEPARATE),
)  # fmt: skip


def sanitizer() -> str | None:
    """The compute-sanitizer of the CUDA toolkit, or None."""
    found = shutil.which("compute-sanitizer")
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return found or (str(usual) if usual.exists() else None)


def compile_kernels(out: Path, limit_seconds: float) -> tuple[bool, dict[str, list[str]]]:
    """Run the checks of all steps without the tools.

    Returns:
        (whether they pass, the cases `CHECK/CASE` of each backend that the tools run).
    """
    passed, cases, running = True, {}, {}
    for number, backend in enumerate(("triton", PORTABLE)):
        report = out / f"compile-{number}.json"
        report.unlink(missing_ok=True)
        command = VERIFY.format(backend, 7, f"{KERNEL_CHECKS},G1,G3,G4") + f" --json {report}"
        with (out / f"compile-{number}.txt").open("w", encoding="utf-8") as file:
            running[backend] = report, _start([sys.executable, *command.split()], file, {})
    for backend, (report, process) in running.items():
        try:
            passed &= process.wait(limit_seconds) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            passed = False
        results = json.loads(report.read_text())["results"] if report.exists() else []
        cases[backend] = [
            f"{result['check']}/{result['case']}"
            for result in results
            if result["check"] in KERNEL_CHECKS.split(",") and result["outcome"] != "unsupported"
        ]
    return passed, cases


def _start(command: list[str], file: Any, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def parts_of(step: Step, out: Path, cases: dict[str, list[str]]) -> list[Part]:
    """The processes of a step; the expensive checks are spread over them."""
    if not step.backend:
        return [Part(step, out / f"{step.name}.txt", step.command)]
    chosen = cases[step.backend]
    count = -(-len(chosen) // PART_SIZE)
    shares = [chosen[number::count] for number in range(count)]
    return [
        Part(
            step,
            out / f"{step.name}-{number}.txt",
            step.command.format(",".join(share)),
            len(share),
        )
        for number, share in enumerate(shares)
    ]


def run_part(part: Part, tool: str | None, deadline: float) -> str:
    """Run one process; "" if it succeeds, else how it ended."""
    left = deadline - time.monotonic()
    if left < 10:
        return "not started"
    command = [sys.executable, *part.command.split()]
    if part.step.tool:
        command = [str(tool), *part.step.tool.split(), *command]
    with part.file.open("w", encoding="utf-8") as file:
        process = _start(command, file, part.step.environment)
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            process.kill()
            return "stopped at the time limit"
    if part.step.tool == INITCHECK:
        own = condense(part.file)
        return f"{own} errors" if own else f"exit code {code}" if code else ""
    return f"exit code {code}" if code else ""


def condense(file: Path) -> int:
    """Keep the errors of attnlib's kernels in an output of initcheck, and the number of others.

    Returns:
        the number of errors of attnlib's kernels.
    """
    kept, own, others = [], 0, 0
    for report in file.read_text(errors="replace").split("========= Uninitialized "):
        kernel = re.search(r"=========     at (.*)", report)
        is_error = report.startswith("__global__")
        if is_error and kernel is not None and "at::" in kernel[1]:
            others += 1
            # Whatever follows the report's own lines is output of the program.
            report = "".join(
                line for line in report.splitlines(True)[1:] if not line.startswith("=========")
            )
        elif is_error:
            own += 1
            report = f"========= Uninitialized {report}" if own <= 100 else ""
        kept.append(re.sub("========= ERROR SUMMARY.*\n", "", report))
    kept.append(f"========= ERROR SUMMARY: {own} errors\n========= {others} {FOREIGN}\n")
    file.write_text("".join(kept), encoding="utf-8")
    return own


def main() -> int:
    """Run the steps; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("stress-results"))
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS])
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--limit-seconds", type=float, default=3600.0)
    parser.add_argument("--commit", help="commit of attnlib, for copies without history")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    tool, deadline, lines = sanitizer(), time.monotonic() + chosen.limit_seconds, []
    steps = [step for step in STEPS if not chosen.only or step.name in chosen.only]
    with ThreadPoolExecutor(chosen.jobs) as pool:
        # The steps without cases of the suite need no list of cases: they run beside `compile`.
        plain = [parts_of(step, chosen.out, {}) for step in steps if not step.backend]
        running = _submit(pool, plain, tool, deadline)
        passed, cases = compile_kernels(chosen.out, chosen.limit_seconds)
        dealt = [parts_of(step, chosen.out, cases) for step in steps if step.backend]
        running |= _submit(pool, dealt, tool, deadline)
    for step in steps:
        ended = {part: run.result() for part, run in running.items() if part.step is step}
        clean, line = _state(step, ended, tool)
        passed &= clean
        lines += [line, f"    {_shown(step)}"]
    _summarize(chosen.out / "stress.txt", lines, chosen)
    print("\n".join(lines))
    return int(not passed)


def _submit(
    pool: ThreadPoolExecutor, steps: list[list[Part]], tool: str | None, deadline: float
) -> dict[Part, Future[str]]:
    return {
        part: pool.submit(run_part, part, tool, deadline)
        for parts in steps
        for part in parts
        if tool is not None or not part.step.tool
    }


def _state(step: Step, ended: dict[Part, str], tool: str | None) -> tuple[bool, str]:
    """(whether the step is complete and without errors, one line about it)."""
    if step.tool and tool is None:
        return False, f"{step.name}: not run, compute-sanitizer is not installed"
    text = "".join(part.file.read_text(errors="replace") for part in ended if part.file.exists())
    problems = sorted({state for state in ended.values() if state})
    facts = [", ".join(problems) or "complete"]
    if step.backend:
        complete = sum(part.cases for part, state in ended.items() if not state)
        total = sum(part.cases for part in ended)
        done = sum(not state for state in ended.values())
        facts.append(f"{done} of {len(ended)} processes, {complete} of {total} cases")
    for name in ("passed", "failed", "skipped"):
        if found := re.findall(rf"(\d+) {name}", text):
            facts.append(f"{sum(map(int, found))} {name}")
    if step.tool:
        found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
        facts.append(
            f"{sum(map(int, found))} errors in {len(found)} reports of {step.tool.split()[-1]}"
        )
        if foreign := re.findall(rf"(\d+) {FOREIGN}", text):
            facts.append(f"{sum(map(int, foreign))} {FOREIGN}")
    return not problems and bool(ended), f"{step.name}: {'; '.join(facts)}"


def _shown(step: Step) -> str:
    """The command of a step, for the summary."""
    tool = ["compute-sanitizer", step.tool] if step.tool else []
    variables = [f"{name}={value}" for name, value in step.environment.items()]
    return " ".join([*variables, *tool, "python", step.command.format("CHECK/CASE,...")])


def _summarize(file: Path, lines: list[str], chosen: argparse.Namespace) -> None:
    from attnlib.bench.provenance import provenance

    limits = f"--jobs {chosen.jobs} --limit-seconds {chosen.limit_seconds:.0f}"
    if chosen.only:
        limits += f" --only {' '.join(chosen.only)}"
    facts = provenance(command=f"python tests/gpu/stress.py {limits}", commit=chosen.commit)
    file.write_text("\n".join([json.dumps(facts, indent=1), *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
