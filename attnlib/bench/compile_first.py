"""Compilation before a measurement, in several processes at once.

A process compiles one kernel at a time, and the GPU is idle meanwhile. Kernels stay in caches on
disk, so that the process that measures finds them there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from attnlib.bench.backends import BenchBackend
from attnlib.bench.measure import measure_case
from attnlib.bench.state_case import AnyCase

__all__ = ["call_once", "compile_first"]


def compile_first(arguments: Sequence[str], cases: int, jobs: int) -> str:
    """Call every case once in other processes, which write nothing.

    Args:
        arguments: those of this `attnlib bench`.
        cases: how many cases it has.
        jobs: number of processes.

    Returns:
        A line for the user: the seconds, and how many processes failed. Their cases are compiled
        when they are measured, which shows the reason.
    """
    began, jobs = time.perf_counter(), min(jobs, cases)
    command = [sys.executable, "-m", "attnlib", "bench", *arguments]
    running = [
        subprocess.Popen(
            [*command, "--part", f"{index}/{jobs}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for index in range(jobs)
    ]
    failed = sum(process.wait() != 0 for process in running)
    note = f", of which {failed} failed" if failed else ""
    return f"compiled in {jobs} processes{note}: {time.perf_counter() - began:.0f} s"


def call_once(
    options: argparse.Namespace,
    cases: Sequence[AnyCase],
    backends: Sequence[BenchBackend],
    device: torch.device,
) -> int:
    """Call and check each case without timing; returns the exit status.

    Args:
        options: `no_check`, and `limit_seconds`, after which no case starts.
        cases, backends, device: as in `measure_case`.
    """
    began, limit = time.perf_counter(), options.limit_seconds
    for case in cases:
        if limit is not None and time.perf_counter() - began > limit:
            return 1
        measure_case(case, backends, device, None, check=not options.no_check)
    return 0
