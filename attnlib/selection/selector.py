"""Select a backend for a spec: by argument, `use_backend`, ATTNLIB_BACKEND, or else by priority.

`decision.py` decides from facts. This module collects them: the request, the registry, which
backends are available, and measured rankings. Results are cached under a key of all inputs.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from attnlib import env, tuning
from attnlib.backends._foreign.imports import environment_facts
from attnlib.backends.base import AttentionBackend
from attnlib.backends.placeholder import PlaceholderBackend
from attnlib.cache.layout import get_kv_cache_layout
from attnlib.device import DeviceInfo, current_device_index, resolve_device
from attnlib.selection.current import current_request, parsed, selection_state
from attnlib.selection.decision import Probe, decide
from attnlib.selection.registration import Registration, availability
from attnlib.selection.registry import registrations
from attnlib.selection.report import SelectionReport, selection_error
from attnlib.selection.request import Request
from attnlib.selection.vllm_arguments import spec_from_vllm_arguments
from attnlib.spec import AttentionSpec, LayerSpec, StateSpec

__all__ = ["explain", "get_attn_backend", "measured_ranking"]

Backend = type[AttentionBackend]
Device = torch.device | str | DeviceInfo | None

_MAX_CACHED = 1024
"""Entries of the selection cache; it is cleared when it is full."""

_log = logging.getLogger("attnlib")
_cache: dict[tuple[Any, ...], Backend] = {}


def get_attn_backend(
    spec: LayerSpec | int | None = None,
    backend: str | Backend | torch.dtype | None = None,
    device: Device = None,
    *positional: Any,
    layer_name: str = "",
    **keywords: Any,
) -> Backend:
    """Select the backend for a spec.

    A requested backend is returned or refused, never replaced by another one. Auto returns the
    first backend that supports the spec.

    Args:
        spec: what the layer needs.
        backend: a name, `prefill:NAME,decode:NAME`, `prefix:NAME,suffix:NAME`, a class, or None to
            use `use_backend`, ATTNLIB_BACKEND, or priority, in this order.
        device: where the layer runs; None means a GPU if torch finds one, else the CPU.
        layer_name: name of the layer or group, for the log line.

    The arguments of vLLM's function of this name are accepted too
    (`attnlib.selection.vllm_arguments`); this is why `spec` may be an integer and `backend` a
    dtype.

    Raises:
        UnknownBackendError: a name that is not registered.
        BackendUnavailableError: the package, compiler or device of the requested backend is
            missing.
        UnsupportedConfigError: the requested backend does not support the spec, or, for auto, no
            backend does; carries all reasons.
        LayoutMismatchError: the two backends of a pair read no common cache layout.
    """
    if not isinstance(spec, LayerSpec) or positional or keywords:
        arguments = (spec, backend, device, *positional)
        given = spec_from_vllm_arguments(arguments, keywords)
        return PlaceholderBackend if given is None else get_attn_backend(given)
    try:
        found = _cache.get(_key(spec, backend, device))
    except TypeError:  # an unhashable object, such as a list: neither a name nor a class
        parsed(backend, "argument")
        resolve_device(device)
        raise
    if found is None:
        found = _select(spec, backend, resolve_device(device), layer_name)
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        # The key is computed again: reading the plug-ins for the first time changes the generation.
        _cache[_key(spec, backend, device)] = found
    return found


def explain(
    spec: LayerSpec, device: Device = None, backend: str | Backend | None = None
) -> SelectionReport:
    """Report which backend would be chosen for `spec` on `device`, and why.

    Print the report for a table. Availability is probed again at each call.

    Args:
        spec: what the layer needs.
        device: a device, or one of another machine: "sm_90", a name such as "H200", or a
            `DeviceInfo`.
        backend: as in `get_attn_backend`.

    Raises:
        UnknownBackendError: a name that is not registered.
        ContractError: `spec` is not a specification.
    """
    if not isinstance(spec, StateSpec):
        AttentionSpec.check_kind(spec, "explain")
    _cached_availability.cache_clear()
    info = resolve_device(device)
    request, given = current_request(backend)
    return _decide(spec, info, request, _entries(given))


def measured_ranking(spec: LayerSpec, device: DeviceInfo) -> tuning.Ranking | None:
    """The measured order of backends: from the user's tuning table, else the shipped one."""
    table = tuning.tuning_for(device)
    own = table.ranking(spec) if table else None
    return own or tuning.shipped_ranking(spec, device)


@lru_cache(maxsize=256)
def _cached_availability(
    entry: Registration, device: DeviceInfo, environment: frozenset[tuple[str, str]]
) -> tuple[Backend | None, list[str]]:
    """`availability`, once per environment: finding packages on disk takes milliseconds."""
    return availability(entry, device)


def _key(spec: LayerSpec, backend: Any, device: Any) -> tuple[Any, ...]:
    """All inputs of a selection."""
    return spec, backend, device, current_device_index(), selection_state()


def _select(spec: LayerSpec, backend: Any, device: DeviceInfo, layer_name: str) -> Backend:
    env.warn_about_unread_variables()
    request, given = current_request(backend)
    entries = {entry.name: entry for entry in _entries(given)}
    environment = frozenset(os.environ.items())
    probe = functools.partial(_cached_availability, device=device, environment=environment)
    facts = spec, device, request, list(entries.values()), probe
    report = _decide(*facts, only_needed=True)
    if report.chosen is None:
        report = _decide(*facts)  # the error names the backends that would fit
        # What is missing may be installed before the next call.
        _cached_availability.cache_clear()
        if {request.first, request.second} <= set(report.accepted):
            # Both backends fit, the pair does not: raises if it is because of the layouts.
            request.combine(entries[str(request.first)].load(), entries[str(request.second)].load())
        raise selection_error(
            spec, report, request.names, lambda name: _versions(entries[name], device)
        )
    if request.is_auto:
        _log.info("%s%s", f"{layer_name}: " if layer_name else "", report.one_line())
        return entries[report.chosen].load()
    return request.combine(entries[str(request.first)].load(), entries[str(request.second)].load())


def _decide(
    spec: LayerSpec,
    device: DeviceInfo,
    request: Request,
    entries: list[Registration],
    probe: Probe | None = None,
    only_needed: bool = False,
) -> SelectionReport:
    layout = get_kv_cache_layout()
    ranking = measured_ranking(spec, device)
    if layout and isinstance(spec, AttentionSpec):
        # The user's layout applies to every cache, so the backend must be able to read it (P2).
        if spec.kv_cache_layout is None and spec.is_paged and not spec.use_mla:
            spec = spec.replace(kv_cache_layout=layout)
    return decide(
        spec,
        device,
        entries,
        request,
        probe or (lambda entry: availability(entry, device)),
        ranking,
        only_needed,
    )


def _entries(given: Mapping[str, Backend]) -> list[Registration]:
    """All candidates; a class given as argument replaces the registered one of its name."""
    known = registrations()
    replaced = [_registration_of(cls, name, known.get(name)) for name, cls in given.items()]
    return [*replaced, *(entry for name, entry in known.items() if name not in given)]


@lru_cache(maxsize=64)
def _registration_of(cls: Backend, name: str, known: Registration | None) -> Registration:
    """The registration of a class given as argument; one per class, for `_cached_availability`."""
    return replace(known or Registration(name, cls, origin="argument"), target=cls, config={})


def _versions(entry: Registration, device: DeviceInfo) -> str:
    """Versions that a failing import depends on (I3): its package, torch, CUDA, and the device."""
    module = entry.target.partition(":")[0] if isinstance(entry.target, str) else ""
    packages = (entry.origin if entry.is_plugin else "", module.partition(".")[0])
    return environment_facts(
        device, [name for name in dict.fromkeys(packages) if name and name != "attnlib"]
    )
