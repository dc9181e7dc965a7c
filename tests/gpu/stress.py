"""Stress a GPU: long random runs, and the quick conformance suite under compute-sanitizer.

    python tests/gpu/stress.py --out results        # everything
    python tests/gpu/stress.py --only memcheck initcheck

Each step writes its output to OUT/<step>.txt; `stress.txt` summarizes them with hardware, versions
and commit. The suite runs once without the tools, so that Triton's cache holds its kernels. Then
all steps run at the same time, since each leaves most of the GPU idle. The exit code is 0 if no
step failed.

memcheck and initcheck run without torch's caching allocator: each tensor is an allocation of its
own, so that an access past its end and a read of memory that nobody wrote are found. CUDA graphs
cannot be captured then; their checks run in the step `memcheck-graphs`. Left out under the tools
are checks of host code that start processes or count launches, and pools of 2^31 elements, whose
memory the tools cannot shadow in reasonable time. racecheck runs on the portable kernels: it does
not follow the mbarriers by which the warps of the Gluon kernels exchange data, and reports each
exchange as a hazard.
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
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

KERNEL_CHECKS = "V2,F1,W2,K3,S1,N1,N2,N3,N4,L1,L2,L3,Q3,O2,F2,F3,K4,K6,D2"
"""Checks that launch kernels and need neither graphs, other processes nor very large pools."""
TOOL = "--print-limit 20 --error-exitcode 99 --tool"


@dataclass(frozen=True, eq=False)
class Step:
    """One command.

    Attributes:
        name: name of the step and of its output file.
        command: arguments after the interpreter.
        tool: arguments of compute-sanitizer; empty for a run without it.
        environment: variables of the step.
    """

    name: str
    command: str
    tool: str = ""
    environment: dict[str, str] = field(default_factory=dict)


SEPARATE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
VARIANTS = "benchmarks/gpu/variants.py"
QUICK = "-m attnlib verify {} --quick --jobs 1 --only {}"
STEPS = (
    Step("stress", "-m pytest -q -rs -m gpu -p no:cacheprovider tests/gpu/test_stress.py"),
    Step("memcheck", QUICK.format("triton", KERNEL_CHECKS), f"{TOOL} memcheck", SEPARATE),
    Step("memcheck-portable", QUICK.format(f"{VARIANTS}:Portable", KERNEL_CHECKS),
         f"{TOOL} memcheck", SEPARATE),
    Step("memcheck-graphs", QUICK.format("triton", "G1,G3,G4"), f"{TOOL} memcheck"),
    Step("initcheck", QUICK.format("triton", KERNEL_CHECKS), f"{TOOL} initcheck", SEPARATE),
    Step("racecheck-portable", QUICK.format(f"{VARIANTS}:Portable", KERNEL_CHECKS),
         f"{TOOL} racecheck"),
)  # fmt: skip


def sanitizer() -> str | None:
    """The compute-sanitizer of the CUDA toolkit, or None."""
    found = shutil.which("compute-sanitizer")
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return found or (str(usual) if usual.exists() else None)


def arguments(step: Step, tool: str | None) -> list[str]:
    """The command line of a step."""
    python = [sys.executable, *step.command.split()]
    return [str(tool), *step.tool.split(), *python] if step.tool else python


def _compile(out: Path, limit_seconds: float) -> bool:
    """Run the checks of all steps without the tools; whether they pass."""
    passed = True
    for number, backend in enumerate(("triton", f"{VARIANTS}:Portable")):
        command = QUICK.format(backend, f"{KERNEL_CHECKS},G1,G3,G4").replace(
            "--jobs 1", "--jobs 12"
        )
        with (out / f"compile-{number}.txt").open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, *command.split()], stdout=file, stderr=subprocess.STDOUT,
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        try:
            passed &= process.wait(limit_seconds) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            passed = False
    return passed


def main() -> int:
    """Run the steps; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("stress-results"))
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS])
    parser.add_argument("--limit-seconds", type=float, default=3600.0)
    parser.add_argument("--commit", help="commit of attnlib, for copies without history")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    tool, start, running, lines = sanitizer(), time.monotonic(), {}, []
    failed = not _compile(chosen.out, chosen.limit_seconds)
    for step in STEPS:
        if chosen.only and step.name not in chosen.only:
            continue
        if step.tool and tool is None:
            lines.append(f"{step.name}: not run, compute-sanitizer is not installed")
            continue
        with (chosen.out / f"{step.name}.txt").open("w", encoding="utf-8") as file:
            running[step] = subprocess.Popen(
                arguments(step, tool), stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **step.environment},
            )  # fmt: skip
    for step, process in running.items():
        left = max(chosen.limit_seconds - (time.monotonic() - start), 1.0)
        try:
            state = f"exit code {process.wait(left)}"
        except subprocess.TimeoutExpired:
            process.kill()
            state = f"stopped after {chosen.limit_seconds:.0f} s"
        failed |= state != "exit code 0"
        lines.append(f"{step.name}: {state}; {_result(chosen.out / f'{step.name}.txt')}")
        shown = " ".join(["compute-sanitizer", step.tool] if step.tool else [])
        variables = " ".join(f"{name}={value}" for name, value in step.environment.items())
        lines.append("    " + " ".join(f"{variables} {shown} python {step.command}".split()))
    _summarize(chosen.out / "stress.txt", lines, chosen.commit)
    print("\n".join(lines))
    return int(failed)


def _result(file: Path) -> str:
    """The lines of an output that state a result."""
    wanted = re.compile(r"ERROR SUMMARY|RACECHECK SUMMARY|passed|failed|PASSED|FAILED|skipped")
    lines = [line.strip("= \n") for line in file.read_text(errors="replace").splitlines()]
    return "; ".join([line for line in lines if wanted.search(line)][-4:]) or "no result"


def _summarize(file: Path, lines: list[str], commit: str | None) -> None:
    from attnlib.bench.provenance import provenance

    facts = provenance(command="python tests/gpu/stress.py", commit=commit)
    file.write_text("\n".join([json.dumps(facts, indent=1), *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
