"""Run the conformance suite on a backend and return a report.

    report = run_conformance("triton")
    assert report.passed, report

Unsupported cases and cases that cannot run are counted separately. A backend that supports none of
the cases does not pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.device import resolve_device
from attnlib.errors import UnsupportedConfigError
from attnlib.kv_formats import load_kv_format
from attnlib.testing.backend_under_test import (
    BackendUnderTest,
    load_backend,
    refuse_unavailable,
)
from attnlib.testing.check import Check, run_check, select_cases
from attnlib.testing.checks import CHECKS
from attnlib.testing.checks.kv_format_caches import kv_format_case
from attnlib.testing.coverage import measure_coverage
from attnlib.testing.kv_formats import KV_FORMAT_CHECKS
from attnlib.testing.outcome import CaseResult, Outcome
from attnlib.testing.parallel import default_jobs, run_in_parallel
from attnlib.testing.report import ConformanceReport, report_versions

__all__ = [
    "ConformanceReport",
    "checks_of",
    "count_cases",
    "find_available_backends",
    "make_target",
    "run_conformance",
]

Backend = type[AttentionBackend]


def run_conformance(
    backend: str | Backend,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    quick: bool = False,
    only: str | None = None,
    against: Sequence[str | Backend] | None = None,
    label: str | None = None,
    checks: Iterable[Check] | None = None,
    jobs: int | None = None,
    score: str | None = None,
    kv_format: str | None = None,
    on_result: Callable[[CaseResult], None] | None = None,
) -> ConformanceReport:
    """Run the conformance suite on a backend.

    Args:
        backend: a registered name, a `module:Class` path or a class.
        device: the device to run on. None selects the GPU if torch sees one and the backend
            declares it, otherwise the CPU.
        seed: seed of all random numbers; the outcomes must not depend on it.
        quick: run the short form of each check.
        only: comma-separated CHECK or CHECK/CASE patterns; None runs everything.
        against: backends to exchange caches with. None selects `torch`, or for `torch` itself all
            other backends that are available.
        label: the backend's name in reproduction lines; None derives it from `backend`.
        checks: the checks to run; None for those of backends, or of the KV format.
        jobs: number of worker processes. None selects several on a GPU, where kernel compilation
            takes most of the time, and one elsewhere.
        score: path of a score function, `module:name` or `path/to/file.py:name`. Check S1 then
            tests the backend with this function and is the only check unless `only` selects more.
        kv_format: a KV format (`kv_formats.load_kv_format`), which is tested over the
            backend instead of the backend (P16).
        on_result: called after each case, for progress bars.

    Raises:
        UnknownBackendError: no backend is registered under the name.
        BackendUnavailableError: the backend cannot run on this machine; the message says why.
        ContractError: the backend supports none of the common cases, or there is no such format.
        UnsupportedConfigError: the backend does not read the format.
    """
    started = time.perf_counter()
    target = make_target(
        backend,
        device=device,
        seed=seed,
        quick=quick,
        against=against,
        label=label,
        score=score,
        kv_format=kv_format,
    )
    checks = checks_of(target) if checks is None else checks
    only = only or (None if score is None else "S1")
    base = target.base_case if "attention" in target.kinds else "state layers only"
    results = _run(checks, target, only, jobs, on_result)
    return _report(target, only, str(base), results, started)


def _report(
    target: BackendUnderTest,
    only: str | None,
    base: str,
    results: Sequence[CaseResult],
    started: float,
) -> ConformanceReport:
    """The report of a run that started at a time of `time.perf_counter`."""
    kv_format = target.kv_format
    return ConformanceReport(
        backend=target.label,
        backend_class=":".join(target.backend.full_cls_name()),
        device=str(target.device),
        seed=target.seed,
        quick=target.quick,
        only=only,
        base_case=base,
        results=tuple(results),
        coverage=measure_coverage(target.backend, results),
        seconds=time.perf_counter() - started,
        versions=report_versions(),
        kv_format=None if kv_format is None else load_kv_format(kv_format).name,
    )


def _run(
    checks: Iterable[Check],
    target: BackendUnderTest,
    only: str | None,
    jobs: int | None,
    on_result: Callable[[CaseResult], None] | None,
) -> list[CaseResult]:
    """Run the checks in processes, or one after the other."""
    processes = default_jobs(target) if jobs is None else jobs
    if processes > 1 and checks is CHECKS:
        return run_in_parallel(target, only, processes, on_result)
    results: list[CaseResult] = []
    for check in checks:
        if broken_by := _first_cuda_error(results):
            message = f"{broken_by} left the CUDA context in an error state"
            results.append(CaseResult(check.id, "all", Outcome.NOT_RUN, message))
        else:
            results += run_check(check, target, only, on_result)
    return results


def make_target(
    backend: str | Backend,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    quick: bool = False,
    against: Sequence[str | Backend] | None = None,
    label: str | None = None,
    score: str | None = None,
    kv_format: str | None = None,
) -> BackendUnderTest:
    """Create the `BackendUnderTest` from the arguments of `run_conformance`.

    Raises:
        UnknownBackendError: no backend is registered under the name.
        BackendUnavailableError: the backend's package, compiler or device is not available; the
            message names the next action.
        ContractError: there is no such KV format.
        UnsupportedConfigError: the backend does not read it.
    """
    loaded = load_backend(backend)
    place = _choose_device(loaded, device)
    refuse_unavailable(loaded, place)
    if against is not None:
        peers: tuple[Backend, ...] = tuple(load_backend(peer) for peer in against)
        for peer in peers:
            refuse_unavailable(peer, place)
    else:
        is_torch = loaded.get_name() == "torch"
        peers = tuple(
            peer
            for peer in find_available_backends(place)
            if (peer.get_name() == "torch") is not is_torch
        )
    name = label or (backend if isinstance(backend, str) else ":".join(loaded.full_cls_name()))
    target = BackendUnderTest(loaded, name, place, seed, quick, peers, score, kv_format)
    if kv_format is not None:
        reasons = loaded.validate_configuration(kv_format_case(target).spec, resolve_device(place))
        if reasons:
            raise UnsupportedConfigError(
                f"{name} does not read {kv_format}: {'; '.join(reasons)}", backend=name
            )
    return target


def checks_of(target: BackendUnderTest) -> Sequence[Check]:
    """The checks of a backend, or of the KV format under test."""
    return CHECKS if target.kv_format is None else KV_FORMAT_CHECKS


def count_cases(target: BackendUnderTest, only: str | None = None) -> int:
    """Number of selected cases; runs none of them."""
    return sum(len(select_cases(check, target, only)) for check in checks_of(target))


def find_available_backends(device: torch.device) -> list[Backend]:
    """All registered backends that are available on `device`."""
    from attnlib.selection import list_backends

    info, available = resolve_device(device), []
    for name in list_backends():
        try:
            backend = load_backend(name)
        except ImportError:
            continue  # the backend's package is not installed; `attnlib list` reports it
        declared = backend.capabilities.devices or backend.state_capabilities.devices or ()
        if info.type in declared and not backend.unavailable(info):
            available.append(backend)
    return available


def _first_cuda_error(results: Sequence[CaseResult]) -> str:
    """Id of the first case with a CUDA error, which makes all later CUDA calls fail; or ""."""
    ids = (
        result.id
        for result in results
        if result.outcome is Outcome.FAIL and "CUDA error" in result.message
    )
    return next(ids, "")


def _choose_device(backend: Backend, device: torch.device | str | None) -> torch.device:
    if device is not None:
        place = torch.device(device)
    else:
        declared = backend.capabilities.devices or backend.state_capabilities.devices or ("cpu",)
        place = torch.device("cuda" if "cuda" in declared and torch.cuda.is_available() else "cpu")
    if place.type == "cuda" and place.index is None and torch.cuda.is_available():
        place = torch.device("cuda", torch.cuda.current_device())
    return place
