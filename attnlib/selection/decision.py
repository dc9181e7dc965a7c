"""The decision: which backend fits a request, from the facts that are passed in.

Nothing here imports a backend module or inspects the machine: `probe` does both for the caller, so
that tests can decide for any hardware.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from attnlib.backends.base import AttentionBackend
from attnlib.capabilities import (
    Capabilities,
    StateCapabilities,
    serves_kind,
    unsupported_reasons,
)
from attnlib.device import DeviceInfo
from attnlib.errors import LayoutMismatchError
from attnlib.selection.cache_lines import cache_lines, write_line
from attnlib.selection.registration import Registration
from attnlib.selection.report import CandidateReport, SelectionReport, SelectionStatus
from attnlib.selection.request import Request
from attnlib.spec import AttentionSpec, AttentionType, LayerSpec, StateSpec
from attnlib.tuning import Ranking

__all__ = ["Probe", "auto_order", "decide"]

Backend = type[AttentionBackend]
Probe = Callable[[Registration], "tuple[Backend | None, list[str]]"]
"""Registration -> (its class, or None if it cannot be imported; why it is unavailable)."""

_INTERPRETED_ON_CPU = ("triton",)
"""Backends that a CPU can only interpret: correct, but thousands of times slower, so auto skips
them there. They can be selected by name."""


def auto_order(
    entries: Sequence[Registration],
    device: DeviceInfo,
    measured: Sequence[str] = (),
    classes: Mapping[str, Backend | None] | None = None,
) -> list[Registration]:
    """Backends that auto considers on `device`, best first; equal priorities by name.

    Args:
        entries: all known backends.
        device: facts about the device.
        measured: names in the order of a tuning table. These backends exchange places among
            themselves; a backend that was not measured keeps the place of its priority.
        classes: name -> class, whose priority holds where the registration has none.
    """
    classes = classes or {}
    priorities = {e.name: e.auto_priority(classes.get(e.name)) for e in entries}
    candidates = [
        entry
        for entry in entries
        if priorities[entry.name] is not None
        and not (device.type == "cpu" and entry.name in _INTERPRETED_ON_CPU)
    ]
    ordered = sorted(candidates, key=lambda entry: (-(priorities[entry.name] or 0), entry.name))
    by_name = {entry.name: entry for entry in ordered}
    ranked = iter([by_name[name] for name in measured if name in by_name])
    return [next(ranked) if entry.name in measured else entry for entry in ordered]


def decide(
    spec: LayerSpec,
    device: DeviceInfo,
    entries: Sequence[Registration],
    request: Request,
    probe: Probe,
    ranking: Ranking | None = None,
    only_needed: bool = False,
) -> SelectionReport:
    """Choose a backend and report on every candidate.

    Args:
        spec: what the layer needs.
        device: facts about the device.
        entries: all known backends.
        request: what the user asks for.
        probe: loads a backend and checks its availability; not called for excluded backends.
        ranking: the measured order of backends for this kind of layer, if there is one.
        only_needed: probe those that are requested, or for auto those up to the first that fits,
            and such whose place only their class knows; the report leaves others out.
    """
    probe = functools.cache(probe)
    if only_needed and not request.is_auto:
        entries = [entry for entry in entries if entry.name in request.names]
    asked = [entry for entry in entries if entry.name not in request.excluded]
    classes = {entry.name: probe(entry)[0] for entry in asked if entry.priority is None}
    order = auto_order(entries, device, ranking.order if ranking else (), classes)
    in_order = {entry.name for entry in order}
    rest = sorted((e for e in entries if e.name not in in_order), key=lambda e: e.name)
    candidates: list[CandidateReport] = []
    accepted: dict[str, Backend] = {}
    for entry in (*order, *rest):
        if entry.name in request.excluded:
            reason = f"excluded by {request.source}"
            candidates.append(CandidateReport(entry.name, SelectionStatus.EXCLUDED, (reason,)))
            continue
        backend, unavailable = probe(entry)
        candidates.append(_evaluate(spec, device, entry.name, backend, unavailable))
        if backend is not None and candidates[-1].status is SelectionStatus.ACCEPTED:
            accepted[entry.name] = backend
            if only_needed and request.is_auto and entry.name in in_order:
                break
    chosen = None
    if request.is_auto:
        chosen = next((entry.name for entry in order if entry.name in accepted), None)
    elif {request.first, request.second} <= accepted.keys():
        if request.roles is not None:
            candidates.insert(0, _evaluate_pair(spec, device, request, accepted))
        if request.roles is None or candidates[0].status is SelectionStatus.ACCEPTED:
            chosen = request.text
    return SelectionReport(
        chosen,
        "auto" if request.is_auto else request.source,
        str(device),
        tuple(_with_reason(c, chosen, request, ranking, c.name in in_order) for c in candidates),
    )


def _evaluate(
    spec: LayerSpec,
    device: DeviceInfo,
    name: str,
    backend: Backend | None,
    unavailable_reasons: Sequence[str] = (),
) -> CandidateReport:
    reasons: tuple[str, ...] = ()
    missing = tuple(unavailable_reasons)
    if backend is not None and not (missing and device.is_missing):
        try:
            if missing:  # limits of a missing package, too: to install it would not help
                declared = _declared(backend, spec)
                reasons = tuple(unsupported_reasons(spec, device, declared))
                missing = missing if serves_kind(spec, declared) else ()
            else:
                reasons = tuple(_reasons(backend, spec, device))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a faulty one must not prevent the choice of another one
            reasons = (f"its validate_configuration raised {type(error).__name__}: {error}",)
    if backend is None or unavailable_reasons:
        return CandidateReport(name, SelectionStatus.UNAVAILABLE, (*reasons, *missing))
    if reasons:
        return CandidateReport(name, SelectionStatus.UNSUPPORTED, reasons)
    lines = _explain_lines(backend, spec, device)
    return CandidateReport(name, SelectionStatus.ACCEPTED, explain_lines=lines)


def _declared(backend: Backend, spec: LayerSpec) -> Capabilities | StateCapabilities:
    is_state = isinstance(spec, StateSpec)
    return backend.state_capabilities if is_state else backend.capabilities


def _reasons(backend: Backend, spec: LayerSpec, device: DeviceInfo) -> list[str]:
    if isinstance(spec, StateSpec):  # `validate_configuration` of a plug-in may not know them
        return backend.state_reasons(spec, device)
    return backend.validate_configuration(spec, device)


def _explain_lines(backend: Backend, spec: LayerSpec, device: DeviceInfo) -> tuple[str, ...]:
    try:
        if isinstance(spec, StateSpec):
            return tuple(backend.explain_state_lines(spec, device))
        assert isinstance(spec, AttentionSpec)
        lines = list(backend.explain_lines(spec, device))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # missing information must not prevent the choice
        lines = [f"its explain_lines raised {type(error).__name__}: {error}"]
        if isinstance(spec, StateSpec):
            return tuple(lines)
    assert isinstance(spec, AttentionSpec)
    if backend.capabilities.needs_finite_cache:
        lines.append("requires a cache without NaN or Inf in unused slots")
    if (least := backend.capabilities.least_product) > -math.inf:
        lines.append(f"hides keys whose unscaled product with the query is below {least:g}")
    decodes = spec.attn_type is AttentionType.DECODER and not spec.use_mla
    if backend.capabilities.rotary_write and decodes:
        lines.append(write_line(spec))
    lines += cache_lines(spec)
    return tuple(lines)


def _evaluate_pair(
    spec: LayerSpec, device: DeviceInfo, request: Request, accepted: dict[str, Backend]
) -> CandidateReport:
    """Two accepted backends may not fit together: no common layout, or no decode phase."""
    try:
        pair = request.combine(accepted[str(request.first)], accepted[str(request.second)])
    except LayoutMismatchError as error:
        return CandidateReport(request.text, SelectionStatus.UNSUPPORTED, (str(error),))
    return _evaluate(spec, device, request.text, pair)


def _with_reason(
    candidate: CandidateReport,
    chosen: str | None,
    request: Request,
    ranking: Ranking | None,
    in_order: bool,
) -> CandidateReport:
    """Add to an accepted candidate why it was chosen or not."""
    if candidate.status is not SelectionStatus.ACCEPTED:
        return candidate
    measured = ranking.message(candidate.name) if ranking and request.is_auto else None
    reasons = [measured] if measured else []
    if not request.is_auto:
        if candidate.name != chosen and candidate.name in request.names:
            reasons = ["part of the requested pair"]
    elif not in_order:
        reasons.append("selected only by name")
    elif candidate.name != chosen and not measured:
        reasons = ["lower priority"]
    return CandidateReport(
        candidate.name, candidate.status, tuple(reasons), candidate.explain_lines
    )
