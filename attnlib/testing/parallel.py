"""Run the conformance suite in several processes.

On a GPU, kernel compilation takes most of the time. Cases are distributed round robin, so that
expensive checks are spread over the processes. Each process has its own CUDA context, allocator
statistics and compile hooks, so that measurements do not affect each other. Results are returned in
the order of a single process.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch

from attnlib.ops.dispatch import processors
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import run_check_case, select_cases
from attnlib.testing.checks import CHECKS
from attnlib.testing.outcome import CaseResult

__all__ = ["default_jobs", "run_in_parallel"]

_CaseIds = list[tuple[str, str]]
_CHUNK_SIZE = 6
"""Cases per task: small, so that the progress bar moves."""


def default_jobs(target: BackendUnderTest) -> int:
    """Number of processes: one per two cores, at most 8, on a GPU; one elsewhere."""
    if not target.on_gpu or not _is_picklable(target):
        return 1
    return max(1, min(8, processors() // 2))


def run_in_parallel(
    target: BackendUnderTest,
    only: str | None,
    jobs: int,
    on_result: Callable[[CaseResult], None] | None = None,
) -> list[CaseResult]:
    """Run all selected cases in worker processes.

    Args:
        target: the backend under test.
        only: case filter, see `check.matches_filter`.
        jobs: number of processes.
        on_result: called after each case, for progress bars.

    Raises:
        RuntimeError: a process crashed, for example inside a kernel.
    """
    order: _CaseIds = [
        (check.id, case.id) for check in CHECKS for case in select_cases(check, target, only)
    ]
    shares = [order[index::jobs] for index in range(jobs)]
    results: dict[tuple[str, str], CaseResult] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        # A worker keeps its compiled kernels from chunk to chunk.
        chunks = [
            share[start : start + _CHUNK_SIZE]
            for share in shares
            for start in range(0, len(share), _CHUNK_SIZE)
        ]
        for done in as_completed([pool.submit(_run_chunk, target, chunk) for chunk in chunks]):
            for result in done.result():
                results[result.check, result.case] = result
                if on_result is not None:
                    on_result(result)
    return [results[key] for key in order]


def _run_chunk(target: BackendUnderTest, chunk: _CaseIds) -> list[CaseResult]:
    """Run some cases in a worker process, which looks them up by their ids."""
    torch.set_num_threads(1)
    results = []
    for check in CHECKS:
        case_ids = {case_id for check_id, case_id in chunk if check_id == check.id}
        if case_ids:
            results += [
                run_check_case(check, case, target)
                for case in select_cases(check, target)
                if case.id in case_ids
            ]
    return results


def _is_picklable(target: BackendUnderTest) -> bool:
    """True if the backend classes can be pickled; classes defined in a function cannot."""
    try:
        pickle.dumps((target.backend, target.peers))
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
