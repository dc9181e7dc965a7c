"""The exam: run every probe on a backend and return a report.

    report = run_conformance("triton")
    assert report.passed, report

A backend is taken by name, by `module:Class` path or as a class. A skip is not a pass: what was refused or not run is
counted and listed apart, and a backend that refuses everything has not passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.device import resolve_device
from attnlib.errors import BackendUnavailableError
from attnlib.testing.backend_under_test import BackendUnderTest, load_backend
from attnlib.testing.check import Check, run_check, select_cases
from attnlib.testing.checks import CHECKS
from attnlib.testing.coverage import Coverage, measure_coverage
from attnlib.testing.outcome import CaseResult, Outcome
from attnlib.testing.parallel import default_jobs, run_in_parallel

__all__ = [
    "ConformanceReport",
    "count_cases",
    "find_available_backends",
    "make_target",
    "run_conformance",
]

Backend = type[AttentionBackend]


@dataclass(frozen=True)
class ConformanceReport:
    """The result of one exam.

    Attributes:
        backend: how the caller named it; backend_class: "module:Class" of what was run.
        device, seed, quick, only: how it was run.
        base_case: the sizes that the probes varied.
        results: every case, in order.
        coverage: what became of each declared capability.
        seconds: how long it took.
        versions: of what the outcome may depend on.
    """

    backend: str
    backend_class: str
    device: str
    seed: int
    quick: bool
    only: str | None
    base_case: str
    results: tuple[CaseResult, ...]
    coverage: Coverage
    seconds: float
    versions: dict[str, str]

    @property
    def passed(self) -> bool:
        """No failure, and at least one pass: refusing or skipping everything is not passing."""
        return not self.failures and self.count(Outcome.PASS) > 0

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """The cases that failed."""
        return tuple(result for result in self.results if result.outcome is Outcome.FAIL)

    def count(self, outcome: Outcome) -> int:
        """How many cases ended so."""
        return sum(result.outcome is outcome for result in self.results)

    def failed_checks(self) -> tuple[str, ...]:
        """Ids of the probes with a failure, in order."""
        return tuple(dict.fromkeys(result.probe for result in self.failures))

    def __str__(self) -> str:
        """The readable report; see `attnlib.testing.report`."""
        from attnlib.testing.report import render_report

        return render_report(self)


def run_conformance(
    backend: str | Backend,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    quick: bool = False,
    only: str | None = None,
    against: Sequence[str | Backend] | None = None,
    label: str | None = None,
    probes: Iterable[Check] = CHECKS,
    jobs: int | None = None,
    on_result: Callable[[CaseResult], None] | None = None,
) -> ConformanceReport:
    """Examine a backend.

    Args:
        backend: a registered name, a `module:Class` path or a class.
        device: where; None means a GPU where torch sees one that the backend declares, else the CPU.
        seed: of every random number; the outcome must not depend on it.
        quick: the short form of each probe.
        only: comma-separated PROBE or PROBE/CASE patterns.
        against: backends to exchange caches with; None means `torch`, and for `torch` itself whatever else runs here.
        label: how the backend is named in reproduction lines; None derives it from `backend`.
        probes: which probes to ask.
        jobs: processes to run the cases in; None means several on a GPU, where compiling takes the time, and one elsewhere.
        on_result: called after every case, for progress bars.

    Raises:
        UnknownBackendError: no backend of that name.
        BackendUnavailableError: it cannot run here; the message says why and what to do.
        ContractError: the backend accepts none of the ordinary cases, so there is nothing to examine.
    """
    started = time.perf_counter()
    target = make_target(
        backend, device=device, seed=seed, quick=quick, against=against, label=label
    )
    base = target.base_case
    processes = default_jobs(target) if jobs is None else jobs
    if processes > 1 and probes is CHECKS:
        results = run_in_parallel(target, only, processes, on_result)
    else:
        results = _run_in_order(probes, target, only, on_result)
    return ConformanceReport(
        backend=target.label,
        backend_class=":".join(target.backend.full_cls_name()),
        device=str(target.device),
        seed=seed,
        quick=quick,
        only=only,
        base_case=str(base),
        results=tuple(results),
        coverage=measure_coverage(target.backend, results),
        seconds=time.perf_counter() - started,
        versions=_versions(),
    )


def _run_in_order(
    probes: Iterable[Check],
    target: BackendUnderTest,
    only: str | None,
    on_result: Callable[[CaseResult], None] | None,
) -> list[CaseResult]:
    results: list[CaseResult] = []
    for probe in probes:
        if culprit := _gpu_lost_in(results):
            results.append(
                CaseResult(probe.id, "all", Outcome.NOT_RUN, f"{culprit} broke the CUDA context")
            )
        else:
            results += run_check(probe, target, only, on_result)
    return results


def make_target(
    backend: str | Backend,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    quick: bool = False,
    against: Sequence[str | Backend] | None = None,
    label: str | None = None,
) -> BackendUnderTest:
    """Who sits the exam, from the arguments of `run_conformance`.

    Raises:
        UnknownBackendError: no backend of that name.
        BackendUnavailableError: it cannot run here: its package, compiler or device is missing; the message names the next action.
    """
    loaded = load_backend(backend)
    place = _choose_device(loaded, device)
    if missing := [
        *resolve_device(place).unavailable_reasons,
        *loaded.unavailable(resolve_device(place)),
    ]:
        raise BackendUnavailableError(
            f"{loaded.get_name()} is unavailable on {place}: {'; '.join(missing)}"
        )
    if against is not None:
        others: tuple[Backend, ...] = tuple(load_backend(other) for other in against)
    else:
        is_torch = loaded.get_name() == "torch"
        others = tuple(
            found
            for found in find_available_backends(place)
            if (found.get_name() == "torch") is not is_torch
        )
    name = label or (backend if isinstance(backend, str) else ":".join(loaded.full_cls_name()))
    return BackendUnderTest(loaded, name, place, seed, quick, others)


def count_cases(
    target: BackendUnderTest, only: str | None = None, probes: Iterable[Check] = CHECKS
) -> int:
    """How many cases an exam will have, without running any."""
    return sum(len(select_cases(probe, target, only)) for probe in probes)


def find_available_backends(device: torch.device) -> list[Backend]:
    """Every registered backend that can run on `device` here."""
    from attnlib.selection import list_backends

    info, found = resolve_device(device), []
    for name in list_backends():
        try:
            backend = load_backend(name)
        except ImportError:
            continue  # its package is missing: it is no candidate here, and `attnlib list` says why
        declared = backend.capabilities.devices or ()
        if info.type in declared and not backend.unavailable(info):
            found.append(backend)
    return found


def _gpu_lost_in(results: Sequence[CaseResult]) -> str:
    """The first case that ended in a sticky CUDA error: whatever runs after it fails without being at fault."""
    lost = (
        result.id
        for result in results
        if result.outcome is Outcome.FAIL and "CUDA error" in result.message
    )
    return next(lost, "")


def _choose_device(backend: Backend, device: torch.device | str | None) -> torch.device:
    if device is not None:
        place = torch.device(device)
    else:
        declared = backend.capabilities.devices or ("cpu",)
        place = torch.device("cuda" if "cuda" in declared and torch.cuda.is_available() else "cpu")
    if place.type == "cuda" and place.index is None and torch.cuda.is_available():
        place = torch.device("cuda", torch.cuda.current_device())
    return place


def _versions() -> dict[str, str]:
    import platform
    import sys

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    triton = sys.modules.get("triton")
    if triton is not None:
        versions["triton"] = str(triton.__version__)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        versions["gpu"] = torch.cuda.get_device_name()
    return versions
