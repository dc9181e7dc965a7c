"""From a spec to a backend: argument, then `use_backend`, then ATTNLIB_BACKEND, then priority.

`resolve` is the decision itself: it takes every fact as an argument and returns data. Around it stand the look at the environment, the imports,
and a cache whose key knows all that could change the answer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from attnlib import env
from attnlib.backends.base import AttentionBackend
from attnlib.backends.composite import make_composite
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import BackendUnavailableError, UnsupportedConfigError
from attnlib.selection.inspection import check_backend_class
from attnlib.selection.priority import by_priority
from attnlib.selection.registry import Registration, generation, lookup, registrations
from attnlib.selection.report import CandidateReport, SelectionReport, Verdict
from attnlib.selection.request import AUTO, Request, parse_request, unknown_backend
from attnlib.spec import AttentionSpec

__all__ = ["availability", "explain", "get_attn_backend", "list_backends", "load_backend", "resolve", "use_backend"]

Backend = type[AttentionBackend]
_log = logging.getLogger("attnlib")
_context: ContextVar[str | Backend | None] = ContextVar("attnlib_use_backend", default=None)
_cache: dict[tuple[Any, ...], Backend] = {}


def list_backends() -> list[str]:
    """Names of all known backends, those of installed packages included, in order of priority."""
    return [entry.name for entry in sorted(registrations().values(), key=lambda e: (-(e.priority or 0), e.name))]


def load_backend(name: str) -> Backend:
    """The class behind a name, whether or not it can run here.

    Raises:
        UnknownBackendError: nobody registered it.
        BackendUnavailableError: it cannot be imported.
    """
    entry = lookup(name)
    if entry is None:
        raise unknown_backend(name.strip().lower(), name, "name", registrations())
    try:
        return entry.load()
    except Exception as error:
        raise BackendUnavailableError(f"backend {entry.name!r} cannot be imported: {_told(error, entry)}") from error


@contextmanager
def use_backend(backend: str | Backend | None) -> Iterator[None]:
    """Within the block, choose this backend (in any form that ATTNLIB_BACKEND takes, or a class) unless an argument says otherwise.

    Raises:
        UnknownBackendError: at once, not at the first layer.
    """
    if isinstance(backend, str):
        parse_request(backend, "use_backend", registrations())
    token = _context.set(backend)
    try:
        yield
    finally:
        _context.reset(token)


def get_attn_backend(
    spec: AttentionSpec | int,
    backend: str | Backend | torch.dtype | None = None,
    device: torch.device | str | DeviceInfo | None = None,
    *args: Any,
    layer_name: str = "",
    **seed: Any,
) -> Backend:
    """The backend for a spec. An explicit choice is granted or refused, never replaced; auto takes the first that fits.

    Args:
        spec: what the layer needs.
        backend: a name, `prefill:NAME,decode:NAME`, a class, or None for `use_backend`, ATTNLIB_BACKEND and priority.
        device: where it will run; None means a GPU where torch sees one, else the CPU.
        layer_name: layer or group, for the log line.

    vLLM's own form `get_attn_backend(head_size, dtype, kv_cache_dtype, block_size, is_attention_free=False, use_mla=False, has_sink=False)` works
    too: the spec then has one head.

    Raises:
        UnknownBackendError: a name that nobody registered.
        BackendUnavailableError: the chosen backend's package, compiler or device is missing.
        UnsupportedConfigError: the chosen backend refuses the spec, or in auto no candidate accepts it; carries all reasons.
    """
    if not isinstance(spec, AttentionSpec):
        return _get_by_seed_arguments(spec, backend, device, *args, **seed)
    key = (spec, backend, device, _context.get(), os.environ.get("ATTNLIB_BACKEND"), os.environ.get("TRITON_INTERPRET"), generation())
    found = _cache.get(key)
    if found is None:
        found = _cache[key] = _select(spec, backend, resolve_device(device), layer_name)  # type: ignore[arg-type]  # a dtype is the seed's form
    return found


def explain(
    spec: AttentionSpec, device: torch.device | str | DeviceInfo | None = None, backend: str | Backend | None = None
) -> SelectionReport:
    """What would be chosen for `spec` on `device`, and why: a table when printed, data otherwise. Raises only for an unknown name.

    Args:
        spec: what the layer needs.
        device: a device, or facts about one that is not here (`attnlib.device.DeviceInfo`).
        backend: as in `get_attn_backend`.
    """
    info = resolve_device(device)
    request, classes = _request(backend)
    return resolve(spec, info, list(registrations().values()), request, _prober(info, classes))


Probe = Callable[[Registration], "tuple[Backend | None, list[str]]"]


def resolve(
    spec: AttentionSpec, device: DeviceInfo, entries: Sequence[Registration], request: Request, probe: Probe
) -> SelectionReport:
    """The decision, from facts alone.

    Args:
        spec: what the layer needs.
        device: facts about the device.
        entries: all known backends.
        request: what the user asked for.
        probe: entry -> (its class or None, why it is not available); never called for an excluded one.
    """
    auto_order = by_priority(entries, device)
    rest = sorted((entry for entry in entries if entry not in auto_order), key=lambda e: e.name)
    candidates = []
    for entry in (*auto_order, *rest):
        if entry.name in request.excluded:
            candidates.append(CandidateReport(entry.name, Verdict.EXCLUDED, (f"taken out by {request.source}",)))
        else:
            candidates.append(_judge(spec, device, entry, probe, in_auto=entry in auto_order))
    accepted = {c.name for c in candidates if c.verdict is Verdict.ACCEPTED}
    if request.is_auto:
        chosen = next((entry.name for entry in auto_order if entry.name in accepted), None)
    else:
        chosen = request.text if {request.prefill, request.decode} <= accepted else None
    ordered = tuple(_with_rank(c, chosen) for c in candidates)
    return SelectionReport(chosen, "auto" if request.is_auto else request.source, str(device), ordered)


def _judge(spec: AttentionSpec, device: DeviceInfo, entry: Registration, probe: Probe, *, in_auto: bool) -> CandidateReport:
    backend, missing = probe(entry)
    if backend is None or missing:
        return CandidateReport(entry.name, Verdict.UNAVAILABLE, tuple(missing))
    reasons = backend.validate_configuration(spec, device)
    if reasons:
        return CandidateReport(entry.name, Verdict.REJECTED, tuple(reasons))
    notes = [] if in_auto else ["only by name"]
    if backend.capabilities.needs_finite_cache:
        notes.append("needs a cache without NaN or Inf in unused slots")
    return CandidateReport(entry.name, Verdict.ACCEPTED, tuple(notes))


def _with_rank(candidate: CandidateReport, chosen: str | None) -> CandidateReport:
    if candidate.verdict is not Verdict.ACCEPTED or candidate.name == chosen or candidate.reasons:
        return candidate
    return CandidateReport(candidate.name, candidate.verdict, ("lower priority",) if chosen and ":" not in chosen else ())


def _select(spec: AttentionSpec, backend: str | Backend | None, device: DeviceInfo, layer_name: str) -> Backend:
    env.warn_about_foreign_variables()
    request, classes = _request(backend)
    probe = _prober(device, classes)
    report = resolve(spec, device, [*_anonymous(classes), *registrations().values()], request, probe)
    if report.chosen is None:
        raise _refusal(spec, request, report)
    if request.is_auto:
        _log.info("%s%s", f"{layer_name}: " if layer_name else "", _one_line(report))
    names = [report.chosen, report.chosen] if request.is_auto else [str(request.prefill), str(request.decode)]
    prefill, decode = (_loaded(name, classes) for name in names)
    return prefill if prefill is decode else make_composite(prefill, decode)


def _one_line(report: SelectionReport) -> str:
    passed = [f"{c.name}: {c.verdict.value} ({', '.join(c.reasons)})" for c in report.candidates if c.name != report.chosen and c.reasons]
    return f"chose {report.chosen} on {report.device}" + (f" [{'; '.join(passed)}]" if passed else "")


def _request(backend: str | Backend | None) -> tuple[Request, Mapping[str, Backend]]:
    """The wish that counts, and the class it came with if it came as one."""
    for wish, source in ((backend, "argument"), (_context.get(), "use_backend"), (env.read("ATTNLIB_BACKEND"), "ATTNLIB_BACKEND")):
        if isinstance(wish, type):
            given: Backend = wish
            check_backend_class(given, given.__qualname__)
            name = given.get_name()
            return Request(source, name, name), {name: given}
        if wish:
            request = parse_request(wish, source, registrations())
            if not request.is_auto or request.excluded:
                return request, {}
            if source == "argument" or wish.strip().lower() == "auto":
                return AUTO, {}
    return AUTO, {}


def _anonymous(classes: Mapping[str, Backend]) -> list[Registration]:
    """Classes given by hand stand before registered ones of the same name."""
    return [Registration(name, cls, origin="argument") for name, cls in classes.items()]


def _loaded(name: str, classes: Mapping[str, Backend]) -> Backend:
    return classes.get(name) or load_backend(name)


def availability(entry: Registration, device: DeviceInfo) -> tuple[Backend | None, list[str]]:
    """(its class, or None where it cannot be imported; why it cannot run on `device`, empty when it can). Never raises."""
    try:
        backend = entry.load()
        return backend, backend.unavailable(device)
    except Exception as error:  # a hollow package, an ABI clash or a RuntimeError at import is a reason, never a crash
        return None, [_told(error, entry)]


def _prober(device: DeviceInfo, classes: Mapping[str, Backend]) -> Probe:
    def probe(entry: Registration) -> tuple[Backend | None, list[str]]:
        given = classes.get(entry.name)
        return availability(replace(entry, target=given, config={}) if given else entry, device)

    return probe


def _told(error: Exception, entry: Registration) -> str:
    text = f"{type(error).__name__}: {error}"
    return f"{text}; try: {entry.install_hint}" if entry.install_hint else text


def _refusal(spec: AttentionSpec, request: Request, report: SelectionReport) -> Exception:
    others = [c.name for c in report.candidates if c.verdict is Verdict.ACCEPTED]
    if request.is_auto:
        table = "\n".join(f"  {c.name}: {'; '.join(c.reasons)}" for c in report.candidates)
        return UnsupportedConfigError(
            f"no backend fits {spec} on {report.device}:\n{table}", backend="auto", reasons=[r for c in report.candidates for r in c.reasons]
        )
    bad = next(c for c in report.candidates if c.name in (request.prefill, request.decode) and c.verdict is not Verdict.ACCEPTED)
    instead = f"Backends that accept the same spec here: {', '.join(others)}." if others else "No other backend accepts this spec here either."
    message = f"backend {bad.name!r} (from {request.source}) is {bad.verdict.value} on {report.device}: {'; '.join(bad.reasons)}. {instead}"
    if bad.verdict is Verdict.UNAVAILABLE:
        return BackendUnavailableError(message)
    return UnsupportedConfigError(message, backend=bad.name, reasons=bad.reasons)


def _get_by_seed_arguments(
    head_size: int,
    dtype: Any,
    kv_cache_dtype: Any = "auto",
    block_size: int = 16,
    is_attention_free: bool = False,
    use_mla: bool = False,
    has_sink: bool = False,
) -> Backend:
    if is_attention_free:
        raise UnsupportedConfigError("is_attention_free=True: a model without attention needs no attention backend", reasons=["is_attention_free"])
    spec = AttentionSpec(
        num_heads=1,
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype or "auto",
        block_size=block_size,
        use_mla=use_mla,
        has_sink=has_sink,
    )
    return get_attn_backend(spec)
