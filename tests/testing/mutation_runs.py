"""Runs of `attnlib verify torch` with one changed module, in forked processes.

The parent has imported torch but not attnlib, so that a run needs no second import of torch and
imports attnlib with the change. The files of the tree are not changed.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any

from tests.testing.mutants import Mutant
from tests.testing.mutation_suite import first_failure, record_lines

__all__ = ["FORMS", "ROOT", "Result", "Run", "measured_lines", "run_all"]

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("full", "quick")
_MEMORY = 64 << 30
"""Bytes of address space of a run; check O1 maps 8 GiB that it does not touch."""


_FIRST_CASES = 8


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        outcome: "check" (a case failed), "error" (an exception outside the cases), "crash" (the
            process ended), "timeout" or "survives".
        detail: CHECK/CASE, the exception, the exit status, or "".
        seconds: run time.
    """

    outcome: str
    detail: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {**asdict(self), "seconds": round(self.seconds, 2)}

    def __str__(self) -> str:
        """The outcome in a few words."""
        return f"{self.outcome} {self.detail}".strip()


@dataclass
class Run:
    """One form of the suite with one changed module; the result goes to `results[form]`.

    `first` has CHECK/CASE of cases that run before all others, because they noticed other mutants
    of the file: the order of the cases changes the time until the first failure, not the outcome.
    """

    file: str
    mutant: Mutant
    form: str
    checks: str | None
    timeout: float
    first: tuple[str, ...] = ()
    results: dict[str, Result] = field(default_factory=dict)


@dataclass
class _Process:
    """A process that has been started, and the file to which it writes its result."""

    run: Run
    pid: int
    output: Path
    started: float

    def result(self) -> Result | None:
        """The result if the process has ended or is stopped at its time limit."""
        seconds = time.monotonic() - self.started
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and seconds < self.run.timeout:
            return None
        if not pid:
            self.stop()
            return Result("timeout", f"{self.run.timeout:g} s", seconds)
        # A mutant may remove temporary files, also this one.
        text = self.output.read_text(encoding="utf-8") if self.output.exists() else ""
        if text:
            return Result(*json.loads(text), seconds=seconds)
        return Result("crash", f"exit status {os.waitstatus_to_exitcode(status)}", seconds)

    def stop(self) -> None:
        """End the process and those that it has started."""
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def run_all(
    runs: Sequence[Run],
    jobs: int,
    limit: float = float("inf"),
    following: Callable[[Run], Run | None] = lambda _: None,
) -> Iterator[Run]:
    """Run all in `jobs` processes and yield each when it is done.

    Args:
        runs: the runs; each gets its result.
        jobs: number of processes.
        limit: seconds after which the remaining runs are given up, without a result.
        following: what runs after a run that is done; None for nothing.
    """
    _prepare()
    waiting, active = list(reversed(runs)), list[_Process]()
    noticed: dict[str, Counter[str]] = {}
    end, numbers = time.monotonic() + limit, itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while (waiting or active) and time.monotonic() < end:
                while waiting and len(active) < jobs:
                    output, run = Path(folder) / f"{next(numbers)}.json", waiting.pop()
                    often = noticed.setdefault(run.file, Counter()).most_common(_FIRST_CASES)
                    active.append(
                        _start(replace(run, first=tuple(case for case, _ in often)), output)
                    )
                time.sleep(0.01)
                for process in list(active):
                    if (result := process.result()) is not None:
                        active.remove(process)
                        process.output.unlink(missing_ok=True)
                        process.run.results[process.run.form] = result
                        if result.outcome == "check":
                            noticed[process.run.file][result.detail] += 1
                        if (more := following(process.run)) is not None:
                            waiting.append(more)
                        yield process.run
        finally:
            for process in active:
                process.stop()


def measured_lines(
    forms: Sequence[str], checks: str | None, folders: Sequence[str]
) -> dict[str, tuple[dict[str, set[int]], str]]:
    """Form -> the lines in `folders` that it executes without a change, and its failure or ""."""
    _prepare()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        outputs = {form: Path(folder) / f"{form}.json" for form in forms}
        pids = {form: _measure(form, checks, folders, outputs[form]) for form in forms}
        for form, pid in pids.items():
            status = os.waitpid(pid, 0)[1]
            if not outputs[form].exists():
                found[form] = {}, f"exit status {os.waitstatus_to_exitcode(status)}"
                continue
            lines, (outcome, detail) = json.loads(outputs[form].read_text(encoding="utf-8"))
            by_file = {file: set(numbers) for file, numbers in lines.items()}
            found[form] = by_file, "" if outcome == "survives" else f"{outcome} {detail}"
    return found


def _measure(form: str, checks: str | None, folders: Sequence[str], output: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    lines = record_lines(tuple(str(ROOT / name) + os.sep for name in folders))
    failure = first_failure(form, checks)
    relative = {
        Path(file).relative_to(ROOT).as_posix(): sorted(executed)
        for file, executed in lines.items()
    }
    output.write_text(json.dumps([relative, failure]), encoding="utf-8")
    os._exit(0)


def _prepare() -> None:
    """Import torch, with one thread: threads do not survive a fork."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for name in [name for name in os.environ if name.startswith(("ATTNLIB_", "TRITON_"))]:
        del os.environ[name]
    import torch

    torch.set_num_threads(1)
    if "attnlib" in sys.modules:
        raise RuntimeError("attnlib is already imported: the changes would have no effect")
    sys.path.insert(0, str(ROOT))


def _start(run: Run, output: Path) -> _Process:
    sys.stdout.flush()
    output.touch()
    started = time.monotonic()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)
        return _Process(run, pid, output, started)
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(silent, descriptor)
        _change_module(run)
        found = first_failure(run.form, run.checks, run.first)
        output.write_text(json.dumps(found), encoding="utf-8")
    finally:
        os._exit(0)


def _change_module(run: Run) -> None:
    """Let the next import of the module run the changed code."""
    path, read = str(ROOT / run.file), importlib.machinery.SourceFileLoader.get_code
    with run.mutant.applied() as tree:
        changed = compile(tree, path, "exec", dont_inherit=True)

    def get_code(loader: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        return changed if loader.get_filename(fullname) == path else read(loader, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
