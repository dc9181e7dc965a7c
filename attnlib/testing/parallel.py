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

from attnlib.testing.backend_under_test import Subject
from attnlib.testing.outcome import Outcome
from attnlib.testing.probe import run_check, select_checks
from attnlib.testing.probes import PROBES

__all__ = ["default_jobs", "run_in_parallel"]

_Share = list[tuple[str, str]]


def default_jobs(subject: Subject) -> int:
    """Processes that pay: on a GPU one for two cores, at most 8; elsewhere one, since torch uses the cores itself."""
    if not subject.on_gpu or not _travels(subject):
        return 1
    return max(1, min(8, (os.cpu_count() or 1) // 2))


def run_in_parallel(
    subject: Subject,
    only: str | None,
    jobs: int,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Every selected case of every probe, by `jobs` processes.

    Raises:
        RuntimeError: a process died (a crash inside a kernel); the cases it had left are unknown.
    """
    order = [
        (probe.id, check.id) for probe in PROBES for check in select_checks(probe, subject, only)
    ]
    shares = [order[index::jobs] for index in range(jobs)]
    found: dict[tuple[str, str], Outcome] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        # Short pieces, so that a bar moves: a worker keeps its compiled kernels from piece to piece.
        pieces = [share[start : start + 6] for share in shares for start in range(0, len(share), 6)]
        for done in as_completed([pool.submit(_sit, subject, piece) for piece in pieces]):
            for outcome in done.result():
                found[outcome.probe, outcome.case] = outcome
                if on_outcome is not None:
                    on_outcome(outcome)
    return [found[key] for key in order]


def _sit(subject: Subject, share: _Share) -> list[Outcome]:
    """One process's piece: the same checks, found again by their ids."""
    torch.set_num_threads(1)
    wanted, outcomes = set(share), []
    for probe in PROBES:
        mine = {case for name, case in wanted if name == probe.id}
        if mine:
            outcomes += [
                run_check(probe, check, subject)
                for check in select_checks(probe, subject)
                if check.id in mine
            ]
    return outcomes


def _travels(subject: Subject) -> bool:
    """Whether another process can find the backends again: classes made inside a function cannot be pickled."""
    try:
        pickle.dumps((subject.backend, subject.others))
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
