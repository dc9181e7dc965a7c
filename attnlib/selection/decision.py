"""The decision itself, from facts alone: it imports nothing and looks at nothing, so a test can imagine any machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnlib.backends.base import AttentionBackend
from attnlib.backends.composite import make_composite
from attnlib.device import DeviceInfo
from attnlib.errors import (
    AttnlibError,
    BackendUnavailableError,
    LayoutMismatchError,
    UnsupportedConfigError,
)
from attnlib.selection.priority import by_priority
from attnlib.selection.registry import Registration
from attnlib.selection.report import CandidateReport, SelectionReport, SelectionStatus
from attnlib.selection.request import Request
from attnlib.spec import AttentionSpec
from attnlib.tuning import Ranking

__all__ = ["Probe", "refusal", "resolve"]

Backend = type[AttentionBackend]
Probe = Callable[[Registration], "tuple[Backend | None, list[str]]"]


def resolve(
    spec: AttentionSpec,
    device: DeviceInfo,
    entries: Sequence[Registration],
    request: Request,
    probe: Probe,
    ranking: Ranking | None = None,
) -> SelectionReport:
    """The decision.

    Args:
        spec: what the layer needs.
        device: facts about the device.
        entries: all known backends.
        request: what the user asked for.
        probe: entry -> (its class or None, why it is not available); never called for an excluded one.
        ranking: the order of backends that was measured on this chip for such layers, where somebody has.
    """
    auto_order = by_priority(entries, device, ranking.order if ranking else ())
    rest = sorted((entry for entry in entries if entry not in auto_order), key=lambda e: e.name)
    candidates: list[CandidateReport] = []
    accepted: dict[str, Backend] = {}
    for entry in (*auto_order, *rest):
        if entry.name in request.excluded:
            candidates.append(
                CandidateReport(
                    entry.name, SelectionStatus.EXCLUDED, (f"taken out by {request.source}",)
                )
            )
            continue
        backend, missing = probe(entry)
        told = None if entry in auto_order else "only by name"
        candidates.append(
            _judge(
                spec,
                device,
                entry,
                backend,
                missing,
                told or (ranking.message(entry.name) if ranking else None),
            )
        )
        if backend is not None and candidates[-1].status is SelectionStatus.ACCEPTED:
            accepted[entry.name] = backend
    chosen = None
    if request.is_auto:
        chosen = next((entry.name for entry in auto_order if entry.name in accepted), None)
    elif {request.prefill, request.decode} <= accepted.keys():
        chosen = request.text
        if request.is_composite:
            pair = _judge_pair(spec, device, request, accepted)
            candidates.insert(0, pair)
            chosen = chosen if pair.status is SelectionStatus.ACCEPTED else None
    return SelectionReport(
        chosen,
        "auto" if request.is_auto else request.source,
        str(device),
        tuple(_with_rank(c, chosen) for c in candidates),
    )


def _judge(
    spec: AttentionSpec,
    device: DeviceInfo,
    entry: Registration,
    backend: Backend | None,
    missing: list[str],
    rank: str | None,
) -> CandidateReport:
    if backend is None or missing:
        return CandidateReport(entry.name, SelectionStatus.UNAVAILABLE, tuple(missing))
    reasons = _reasons(backend, spec, device)
    if reasons:
        return CandidateReport(entry.name, SelectionStatus.UNSUPPORTED, reasons)
    notes = [*([rank] if rank else []), *_notes(backend, spec, device)]
    if backend.capabilities.needs_finite_cache:
        notes.append("needs a cache without NaN or Inf in unused slots")
    return CandidateReport(entry.name, SelectionStatus.ACCEPTED, tuple(notes))


def _notes(backend: Backend, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    try:
        return backend.explain_lines(spec, device)
    except Exception as error:  # a remark must not cost the choice
        return [f"its own notes failed: {type(error).__name__}: {error}"]


def _judge_pair(
    spec: AttentionSpec, device: DeviceInfo, request: Request, accepted: dict[str, Backend]
) -> CandidateReport:
    """Two backends that each fit may still not fit together: no common layout, or no second phase at all."""
    try:
        pair = make_composite(accepted[str(request.prefill)], accepted[str(request.decode)])
    except LayoutMismatchError as error:
        return CandidateReport(request.text, SelectionStatus.UNSUPPORTED, (str(error),))
    reasons = _reasons(pair, spec, device)
    return CandidateReport(
        request.text, SelectionStatus.UNSUPPORTED if reasons else SelectionStatus.ACCEPTED, reasons
    )


def _reasons(backend: Backend, spec: AttentionSpec, device: DeviceInfo) -> tuple[str, ...]:
    try:
        return tuple(backend.validate_configuration(spec, device))
    except (
        Exception
    ) as error:  # one backend's mistake must not take the choice away from the others
        return (f"its own validate_configuration failed: {type(error).__name__}: {error}",)


def _with_rank(candidate: CandidateReport, chosen: str | None) -> CandidateReport:
    if (
        candidate.status is not SelectionStatus.ACCEPTED
        or candidate.name == chosen
        or candidate.reasons
        or not chosen
        or ":" in chosen
    ):
        return candidate
    return CandidateReport(candidate.name, candidate.status, ("lower priority",))


def refusal(
    spec: AttentionSpec, request: Request, report: SelectionReport, facts: Callable[[str], str]
) -> AttnlibError:
    """The error for a report without a choice: all reasons, and who would accept the same spec.

    Args:
        spec, request, report: what was asked for and what came of it.
        facts: name -> what its availability depends on here, for a backend that is not available (I3).
    """
    if request.is_auto:
        table = "\n".join(f"  {c.name}: {'; '.join(c.reasons)}" for c in report.candidates)
        every = [reason for c in report.candidates for reason in c.reasons]
        return UnsupportedConfigError(
            f"no backend fits {spec} on {report.device}:\n{table}", backend="auto", reasons=every
        )
    wanted = (request.text, request.prefill, request.decode)
    bad = next(
        c
        for c in report.candidates
        if c.name in wanted and c.status is not SelectionStatus.ACCEPTED
    )
    others = [c.name for c in report.candidates if c.status is SelectionStatus.ACCEPTED]
    instead = (
        f"Backends that accept the same spec here: {', '.join(others)}."
        if others
        else "No other backend accepts this spec here either."
    )
    message = f"backend {bad.name!r} (from {request.source}) is {bad.status.value} on {report.device}: {'; '.join(bad.reasons)}. {instead}"
    if bad.status is SelectionStatus.UNAVAILABLE:
        known = any("cxx11 ABI" in reason for reason in bad.reasons)
        return BackendUnavailableError(message if known else f"{message} {facts(bad.name)}")
    return UnsupportedConfigError(message, backend=bad.name, reasons=bad.reasons)
