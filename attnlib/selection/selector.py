"""From a spec to a backend: argument, then `use_backend`, then ATTNLIB_BACKEND, then priority.

The decision itself is in `decision.py`. Around it stand the look at the environment, the imports, and a cache whose key knows all that could change
the answer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, overload

import torch

from attnlib import env, tuning
from attnlib.backends.base import AttentionBackend
from attnlib.backends.composite import make_composite
from attnlib.cache.layout import get_kv_cache_layout
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import (
    BackendUnavailableError,
    ContractError,
    UnknownBackendError,
    UnsupportedConfigError,
)
from attnlib.selection.availability import availability, facts_about, told
from attnlib.selection.decision import Probe, refusal, resolve
from attnlib.selection.inspection import check_backend_class
from attnlib.selection.registry import Registration, generation, lookup, registrations
from attnlib.selection.report import SelectionReport, SelectionStatus
from attnlib.selection.request import AUTO, Request, parse_request, unknown_backend
from attnlib.spec import AttentionSpec

__all__ = ["explain", "get_attn_backend", "list_backends", "load_backend", "use_backend"]

Backend = type[AttentionBackend]
Device = torch.device | str | DeviceInfo | None
_log = logging.getLogger("attnlib")
_context: ContextVar[str | Backend | None] = ContextVar("attnlib_use_backend", default=None)
_cache: dict[tuple[Any, ...], Backend] = {}


def list_backends() -> list[str]:
    """Names of all known backends, those of installed packages included, in order of priority."""
    return [
        entry.name
        for entry in sorted(registrations().values(), key=lambda e: (-(e.priority or 0), e.name))
    ]


def load_backend(name: str) -> Backend:
    """The class behind a name or a pair (`prefill:NAME,decode:NAME`), whether or not it can run here.

    Raises:
        UnknownBackendError: nobody registered it.
        BackendUnavailableError: it cannot be imported.
        LayoutMismatchError: the halves of a pair read no common cache layout.
    """
    if ":" in name:
        request = parse_request(name, "name", registrations())
        return make_composite(load_backend(str(request.prefill)), load_backend(str(request.decode)))
    entry = lookup(name)
    if entry is None:
        raise unknown_backend(name.strip().lower(), name, "name", registrations())
    try:
        return entry.load()
    except Exception as error:
        raise BackendUnavailableError(
            f"backend {entry.name!r} cannot be imported: {told(error, entry)}"
        ) from error


@contextmanager
def use_backend(backend: str | Backend | None) -> Iterator[None]:
    """Within the block, choose this backend (in any form that ATTNLIB_BACKEND takes, or a class) unless an argument says otherwise.

    Raises:
        UnknownBackendError: at once, not at the first layer.
    """
    _read_wish(backend, "use_backend")
    token = _context.set(backend)
    try:
        yield
    finally:
        _context.reset(token)


@overload
def get_attn_backend(
    spec: AttentionSpec,
    backend: str | Backend | None = None,
    device: Device = None,
    *,
    layer_name: str = "",
) -> Backend: ...


@overload
def get_attn_backend(
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    block_size: int,
    is_attention_free: bool = False,
    use_mla: bool = False,
    has_sink: bool = False,
) -> Backend: ...


def get_attn_backend(  # type: ignore[misc]  # the seed's names arrive in `named_seed`, which mypy does not see through
    spec: Any = None,
    backend: Any = None,
    device: Any = None,
    *seed: Any,
    layer_name: str = "",
    **named_seed: Any,
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
        LayoutMismatchError: the two halves of a pair read no common cache layout.
    """
    if not isinstance(spec, AttentionSpec) or seed or named_seed:
        return _get_by_seed_arguments((spec, backend, device, *seed), named_seed)
    try:
        found = _cache.get(_key(spec, backend, device))
    except TypeError:  # a list, say, cannot be looked up: neither a name nor a class
        _read_wish(backend, "argument")
        raise
    if found is None:
        found = _select(spec, backend, resolve_device(device), layer_name)
        _cache[_key(spec, backend, device)] = (
            found  # a key of its own: the first look at installed packages moves the generation
        )
    return found


def explain(
    spec: AttentionSpec, device: Device = None, backend: str | Backend | None = None
) -> SelectionReport:
    """What would be chosen for `spec` on `device`, and why: a table when printed, data otherwise. Raises only for an unknown name.

    Args:
        spec: what the layer needs.
        device: a device, or facts about one that is not here (`attnlib.device.DeviceInfo`).
        backend: as in `get_attn_backend`.
    """
    info = resolve_device(device)
    request, given = _request(backend)
    return resolve(
        _as_laid_out(spec), info, _entries(given), request, _prober(info), _ranking(spec, info)
    )


def _key(spec: AttentionSpec, backend: Any, device: Any) -> tuple[Any, ...]:
    """All that could change the answer."""
    variables = tuple(
        os.environ.get(name) for name in ("ATTNLIB_BACKEND", "ATTNLIB_TUNING", "TRITON_INTERPRET")
    )
    return (
        spec,
        backend,
        device,
        _context.get(),
        variables,
        get_kv_cache_layout(),
        generation(),
        tuning.generation(),
    )


def _select(
    spec: AttentionSpec, backend: str | Backend | None, device: DeviceInfo, layer_name: str
) -> Backend:
    env.warn_about_foreign_variables()
    request, given = _request(backend)
    entries = {entry.name: entry for entry in _entries(given)}
    report = resolve(
        _as_laid_out(spec),
        device,
        list(entries.values()),
        request,
        _prober(device),
        _ranking(spec, device),
    )
    if report.chosen is None:
        if request.is_composite and {request.prefill, request.decode} <= {
            c.name for c in report.candidates if c.status is SelectionStatus.ACCEPTED
        }:
            make_composite(
                entries[str(request.prefill)].load(), entries[str(request.decode)].load()
            )  # raises when it is the layouts
        raise refusal(spec, request, report, lambda name: facts_about(entries[name], device))
    if request.is_auto:
        _log.info("%s%s", f"{layer_name}: " if layer_name else "", _one_line(report))
    names = (
        [report.chosen, report.chosen]
        if request.is_auto
        else [str(request.prefill), str(request.decode)]
    )
    prefill, decode = (entries[name].load() for name in names)
    return prefill if prefill is decode else make_composite(prefill, decode)


def _one_line(report: SelectionReport) -> str:
    passed = [
        f"{c.name}: {c.status.value} ({', '.join(c.reasons)})"
        for c in report.candidates
        if c.name != report.chosen and c.reasons
    ]
    return f"chose {report.chosen} on {report.device}" + (
        f" [{'; '.join(passed)}]" if passed else ""
    )


def _request(backend: str | Backend | None) -> tuple[Request, Mapping[str, Backend]]:
    """The wish that counts, and the class it came with if it came as one."""
    for wish, source in (
        (backend, "argument"),
        (_context.get(), "use_backend"),
        (env.read("ATTNLIB_BACKEND"), "ATTNLIB_BACKEND"),
    ):
        request, given = _read_wish(wish, source)
        if request is not AUTO or (isinstance(wish, str) and wish.strip()):
            return request, given
    return AUTO, {}


def _read_wish(wish: Any, source: str) -> tuple[Request, Mapping[str, Backend]]:
    """One wish in any form; `AUTO` for none, and for a plain "auto"."""
    if isinstance(wish, type):
        check_backend_class(wish, wish.__qualname__)
        name = wish.get_name()  # type: ignore[attr-defined]  # the check has made sure
        return Request(source, name, name), {name: wish}
    if wish is not None and not isinstance(wish, str):
        raise UnknownBackendError(
            f"{source}={wish!r} is a {type(wish).__name__}: give a backend's name, 'prefill:NAME,decode:NAME', or a class"
        )
    request = parse_request(wish or "", source, registrations())
    return (request if request.excluded or not request.is_auto else AUTO), {}


def _entries(given: Mapping[str, Backend]) -> list[Registration]:
    """All candidates; a class given by hand stands in for a registered one of its name."""
    known = registrations()
    mine = [
        replace(known.get(name, Registration(name, cls, origin="argument")), target=cls, config={})
        for name, cls in given.items()
    ]
    return [*mine, *(entry for name, entry in known.items() if name not in given)]


def _as_laid_out(spec: AttentionSpec) -> AttentionSpec:
    """The spec with the layout that the user insists on for every cache: a backend that cannot read it is no candidate (P2)."""
    insisted = get_kv_cache_layout()
    if insisted is None or spec.kv_cache_layout is not None or not spec.is_paged or spec.use_mla:
        return spec
    return spec.replace(kv_cache_layout=insisted)


def _ranking(spec: AttentionSpec, device: DeviceInfo) -> tuning.Ranking | None:
    """What was measured of such layers on this chip: by the user, else by attnlib."""
    table = tuning.tuning_for(device)
    own = table.ranking(spec) if table else None
    return own or tuning.shipped_ranking(spec, device)


def _prober(device: DeviceInfo) -> Probe:
    return lambda entry: availability(entry, device)


def _get_by_seed_arguments(positional: tuple[Any, ...], named: Mapping[str, Any]) -> Backend:
    while positional and positional[-1] is None:
        positional = positional[:-1]
    head_size = positional[0] if positional else named.get("head_size")
    if not isinstance(head_size, int):
        raise ContractError(
            f"spec={head_size!r} must be an attnlib.AttentionSpec (or head_size as a number, with vLLM's argument list)"
        )
    return get_attn_backend(_spec_of_seed(*positional, **named))


def _spec_of_seed(
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None = "auto",
    block_size: int = 16,
    is_attention_free: bool = False,
    use_mla: bool = False,
    has_sink: bool = False,
) -> AttentionSpec:
    if is_attention_free:
        raise UnsupportedConfigError(
            "is_attention_free=True: a model without attention needs no attention backend",
            reasons=["is_attention_free"],
        )
    return AttentionSpec(
        num_heads=1,
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype or "auto",
        block_size=block_size,
        use_mla=use_mla,
        has_sink=has_sink,
    )
