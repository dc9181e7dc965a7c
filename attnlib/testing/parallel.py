"""The exam in several processes: most of its time on a GPU goes into compiling kernels, one case after the other.

Cases are dealt out round robin, so that the expensive probes are spread; each process has its own CUDA context, allocator statistics and compile
hooks, so what a probe measures stays its own. Outcomes come back in the order of a single process.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import run_check_case, select_cases
from attnlib.testing.checks import CHECKS
from attnlib.testing.outcome import CaseResult

__all__ = ["default_jobs", "run_in_parallel"]

_Share = list[tuple[str, str]]


def default_jobs(target: BackendUnderTest) -> int:
    """Processes that pay: on a GPU one for two cores, at most 8; elsewhere one, since torch uses the cores itself."""
    if not target.on_gpu or not _is_picklable(target):
        return 1
    return max(1, min(8, (os.cpu_count() or 1) // 2))


def run_in_parallel(
    target: BackendUnderTest,
    only: str | None,
    jobs: int,
    on_result: Callable[[CaseResult], None] | None = None,
) -> list[CaseResult]:
    """Every selected case of every probe, by `jobs` processes.

    Raises:
        RuntimeError: a process died (a crash inside a kernel); the cases it had left are unknown.
    """
    order = [
        (probe.id, check.id) for probe in CHECKS for check in select_cases(probe, target, only)
    ]
    shares = [order[index::jobs] for index in range(jobs)]
    found: dict[tuple[str, str], CaseResult] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        # Short pieces, so that a bar moves: a worker keeps its compiled kernels from piece to piece.
        pieces = [share[start : start + 6] for share in shares for start in range(0, len(share), 6)]
        for done in as_completed([pool.submit(_run_chunk, target, piece) for piece in pieces]):
            for result in done.result():
                found[result.probe, result.case] = result
                if on_result is not None:
                    on_result(result)
    return [found[key] for key in order]


def _run_chunk(target: BackendUnderTest, share: _Share) -> list[CaseResult]:
    """One process's piece: the same checks, found again by their ids."""
    torch.set_num_threads(1)
    wanted, results = set(share), []
    for probe in CHECKS:
        mine = {case for name, case in wanted if name == probe.id}
        if mine:
            results += [
                run_check_case(probe, check, target)
                for check in select_cases(probe, target)
                if check.id in mine
            ]
    return results


def _is_picklable(target: BackendUnderTest) -> bool:
    """Whether another process can find the backends again: classes made inside a function cannot be pickled."""
    try:
        pickle.dumps((target.backend, target.peers))
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
