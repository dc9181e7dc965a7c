"""Run shell commands side by side on the GPUs of one machine, within a time limit.

    python benchmarks/gpu/schedule.py JOBS.txt --out results --seconds 540 --devices 0 1

Each line of JOBS.txt is `NAME | GPUS | SECONDS | COMMAND`, in the order of importance; empty lines
and lines that begin with `#` are skipped. GPUS is

- a whole number: so many GPUs for this job only; 0: it needs none;
- a fraction such as 0.25: a share of a GPU beside other jobs with shares;
- `alone`: all GPUs, and no other job runs, for times that depend on the host.

A job begins as soon as its GPUs are free, also before jobs above it that need more, and is stopped
after SECONDS. Nothing passes a job that runs alone. The output of a job goes to `NAME.txt` in the
output directory while it runs; `jobs.json` there has the state of each job.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["MIN_SECONDS", "Job", "read_jobs", "run_jobs"]

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 14
MIN_SECONDS = 10.0
"""Jobs that would have less time are not started."""
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Job:
    """One command.

    Attributes:
        name: of the job and of its output file.
        gpus: whole GPUs, a share of one, or None for the whole machine.
        seconds: its time limit.
        command: arguments, or one string for the shell.
        after: the job that must have ended before; "" for none.
    """

    name: str
    gpus: float | None
    seconds: float
    command: str | list[str]
    after: str = ""


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    taken: dict[str, float]
    limit: float
    began: float = field(default_factory=time.monotonic)


class _Devices:
    """What is free of each GPU."""

    def __init__(self, names: Sequence[str]) -> None:
        self.free = dict.fromkeys(names, 1.0)

    def take(self, gpus: float | None) -> dict[str, float] | None:
        """The shares that a job gets, by GPU, or None while they are not free."""
        whole = [name for name, free in self.free.items() if free == 1.0]
        if gpus is None:
            return {} if len(whole) == len(self.free) else None
        if gpus == int(gpus):
            taken = dict.fromkeys(whole[: int(gpus)], 1.0)
            found = taken if len(taken) == gpus else None
        else:
            fits = [name for name, free in self.free.items() if free >= gpus]
            found = {min(fits, key=self.free.__getitem__): gpus} if fits else None
        for name, share in (found or {}).items():
            self.free[name] = round(self.free[name] - share, 6)
        return found

    def give_back(self, taken: dict[str, float]) -> None:
        for name, share in taken.items():
            self.free[name] = round(self.free[name] + share, 6)


def run_jobs(
    jobs: Sequence[Job],
    out: Path,
    *,
    devices: Sequence[str] = (),
    seconds: float = float("inf"),
    ended: Callable[[dict[str, Any]], None] = lambda result: None,
) -> list[dict[str, Any]]:
    """Run all jobs.

    Args:
        jobs: in the order of importance.
        out: directory of the outputs, which jobs find as `$OUT`.
        devices: values of `CUDA_VISIBLE_DEVICES`, one for each GPU.
        seconds: time limit of the run; jobs that would have less than `MIN_SECONDS` do not start.
        ended: called with the result of each job when it ends.

    Returns:
        For each job its name, command, state, seconds and last lines of output, as they ended.

    Raises:
        ValueError: a job needs more GPUs than there are.
    """
    most = max((job.gpus or 0 for job in jobs), default=0)
    if most > len(devices):
        raise ValueError(f"a job needs {most:g} GPUs, and {len(devices)} are given as devices")
    pool, waiting, running = _Devices(devices), list(jobs), list[_Running]()
    results: list[dict[str, Any]] = []
    end = time.monotonic() + seconds

    def add(result: dict[str, Any]) -> None:
        results.append(result)
        ended(result)

    while waiting or running:
        for one in list(running):
            if one.process.poll() is not None or time.monotonic() - one.began > one.limit:
                running.remove(one)
                pool.give_back(one.taken)
                add(_result(one, out))
        left = end - time.monotonic()
        if left < MIN_SECONDS:
            for job in waiting:
                add({"name": job.name, "state": "not run: no time", "seconds": 0.0})
            waiting.clear()
        alone = any(one.job.gpus is None for one in running)
        not_ended = {job.name for job in waiting} | {one.job.name for one in running}
        for job in [] if alone else list(waiting):
            if job.gpus is None and running:
                break
            taken = None if job.after in not_ended else pool.take(job.gpus)
            if taken is not None:
                waiting.remove(job)
                running.append(_start(job, taken, out, min(job.seconds, left)))
                if job.gpus is None:
                    break
        time.sleep(POLL_SECONDS)
    return results


def _start(job: Job, taken: dict[str, float], out: Path, limit: float) -> _Running:
    environment = {**os.environ, "OUT": str(out), "PYTHONUNBUFFERED": "1"}
    path = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if job.gpus is not None and (taken or job.gpus == 0):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(taken)
    with (out / f"{job.name}.txt").open("w") as sink:
        sink.write(f"# {_printed(job)}\n")
        sink.flush()
        process = subprocess.Popen(
            job.command, shell=isinstance(job.command, str), cwd=ROOT, env=environment,
            stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return _Running(job, process, taken, limit)


def _result(one: _Running, out: Path) -> dict[str, Any]:
    """The result of a job, which is killed if it still runs, with all processes it started."""
    code = one.process.poll()
    if code is None:
        os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
    state = "passed" if code == 0 else f"failed, exit {code}"
    lines = (out / f"{one.job.name}.txt").read_text(errors="replace").splitlines()
    return {
        "name": one.job.name, "command": _printed(one.job),
        "state": f"stopped after {one.limit:.0f} s" if code is None else state,
        "seconds": round(time.monotonic() - one.began, 1), "tail": lines[-TAIL_LINES:],
    }  # fmt: skip


def _printed(job: Job) -> str:
    """The command as one can repeat it."""
    if isinstance(job.command, str):
        return job.command
    shown = ["python" if part == sys.executable else part for part in job.command]
    return shlex.join(shown)


def read_jobs(text: str) -> list[Job]:
    """The jobs of a file.

    Raises:
        ValueError: a line without the four fields.
    """
    jobs = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fields = [part.strip() for part in line.split("|", 3)]
        if len(fields) != 4:
            raise ValueError(f"line {number}: {line!r} is not NAME | GPUS | SECONDS | COMMAND")
        name, gpus, seconds, command = fields
        jobs.append(Job(name, None if gpus == "alone" else float(gpus), float(seconds), command))
    return jobs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--devices", nargs="+", metavar="GPU", default=["0"])
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []

    def ended(result: dict[str, Any]) -> None:
        results.append(result)
        print(f"{result['name']}: {result['state']} ({result['seconds']:.0f} s)", flush=True)
        (out / "jobs.json").write_text(json.dumps(results, indent=1) + "\n")

    jobs = read_jobs(options.jobs.read_text())
    run_jobs(jobs, out, devices=options.devices, seconds=options.seconds, ended=ended)
    return 0 if all(result["state"] == "passed" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
