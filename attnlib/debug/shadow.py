"""Run live attention calls again on a second backend and record the error of each layer.

    with shadow("torch", every=100) as log:
        model.generate(...)
    print(log)

A sampled call is copied with the cache blocks that it uses and run on the second backend. If the
two results differ by more than rounding, the live result is compared with the float64 oracle. A
live result above the error budget is written to a file for `attnlib replay`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attnlib import env
from attnlib.backends.base import AttentionBackend
from attnlib.cache.states import StateCache
from attnlib.debug.capture import capture_layer_call
from attnlib.debug.counted_calls import CountedCalls, StateSampler, new_path
from attnlib.debug.recording import save_recording
from attnlib.debug.recording_files import as_path
from attnlib.debug.shadow_log import ShadowLog, ShadowRecord, difference, rounding_of
from attnlib.debug.state_calls import capture_state_call, save_state_recording
from attnlib.debug.state_runs import compare_state_call, run_state_call
from attnlib.errors import ContractError
from attnlib.instrumentation import OBSERVERS, STATE_OBSERVERS
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.states import StateMetadata
from attnlib.ops.addresses import as_count
from attnlib.testing.backend_under_test import load_backend
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.outcome import UnsupportedCase
from attnlib.testing.runner import AttentionOutput, compare_with_oracle, run_materialized_case

__all__ = ["ShadowLog", "ShadowRecord", "enable_validation_shadow", "shadow", "shadow_call"]

Backend = type[AttentionBackend]


@torch.no_grad()
def shadow_call(
    layer: Any,
    backend: Backend,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: Any,
    metadata: AttentionMetadata,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    name: str = "",
    number: int = 0,
    dump_dir: str | Path | None = None,
) -> ShadowRecord:
    """Run one completed call of an `Attention` layer again on `backend`.

    Args:
        layer: the layer.
        backend: the second backend.
        query, key, value: inputs of the call, [T, Hq, D], [T, Hkv, D] and [T, Hkv, Dv].
        cache, metadata: inputs of the call.
        out: output of the call, [T, Hq, Dv].
        lse: LSE of the call, [T, Hq] float32, or None.
        name: of the layer in the record; by default its prefix.
        number: number of the call in this layer.
        dump_dir: folder for recordings; None means ATTNLIB_DUMP_DIR.
    """
    name = name or layer.prefix or type(layer).__name__
    if cache is None:
        return ShadowRecord(name, number, skipped="calls without a cache are not compared")
    try:
        step = capture_layer_call(
            layer, query, key, value, cache, metadata, needs_lse=lse is not None
        )
    except ContractError as error:
        return ShadowRecord(name, number, skipped=str(error))
    if reasons := backend.validate_configuration(step.spec, query.device):
        return ShadowRecord(name, number, skipped=f"{backend.get_name()}: {'; '.join(reasons)}")
    folder = Path(dump_dir or env.read("ATTNLIB_DUMP_DIR"))
    return _compare(step, backend, AttentionOutput(out, lse), name, number, folder)


def _compare(
    step: MaterializedCase,
    backend: Backend,
    live: AttentionOutput,
    name: str,
    number: int,
    folder: Path,
) -> ShadowRecord:
    second = run_materialized_case(backend, step)
    out_error = difference(live.out, second.out)
    lse_error = None if live.lse is None or second.lse is None else difference(live.lse, second.lse)
    allowed = rounding_of(second.out, step.spec.dtype)
    if out_error <= allowed and (lse_error is None or lse_error <= 1e-3):
        return ShadowRecord(name, number, out_error, lse_error)
    message = compare_with_oracle(step.case, live, live.out.device, reference=step)
    if not message:
        return ShadowRecord(name, number, out_error, lse_error)
    path = save_recording(step, new_path(folder, name, number))
    return ShadowRecord(name, number, out_error, lse_error, message, path)


@torch.no_grad()
def shadow_state_call(
    layer: Any,
    backend: type[AttentionBackend],
    part: str,
    inputs: tuple[torch.Tensor | None, ...],
    cache: StateCache,
    metadata: StateMetadata,
    output: torch.Tensor,
    *,
    place: tuple[str, int] | None = None,
    dump_dir: str | Path | None = None,
) -> Callable[[], ShadowRecord]:
    """Copy a call before it runs.

    Args:
        layer, part, inputs, cache, metadata, output: as an observer gets them.
        backend: the second backend.
        place: name of the layer in the record, and number of the call; by default its prefix and 0.
        dump_dir: folder for recordings; None means ATTNLIB_DUMP_DIR.

    Returns:
        What runs the call on `backend` and compares outputs and states, after the live launches.
    """
    name, number = place or (layer.prefix or type(layer).__name__, 0)
    call = capture_state_call(layer, part, inputs, cache, metadata)

    @torch.no_grad()
    def compare() -> ShadowRecord:
        try:
            second = run_state_call(call, backend)
        except UnsupportedCase as reason:
            return ShadowRecord(name, number, skipped=f"{backend.get_name()}: {reason}")
        if second.problem:
            return ShadowRecord(name, number, skipped=f"{backend.get_name()}: {second.problem}")
        requests, dtype = list(metadata.batch.requests()), call.spec.dtype
        live = call.outcome(output.clone(), cache.tensors, requests)
        error = difference(live.out, second.out)
        pairs = [(live.out, second.out), *zip(live.states, second.states, strict=False)]
        close = all(difference(a, b) <= rounding_of(b, dtype) for a, b in pairs)
        if close and not live.problem:
            return ShadowRecord(name, number, error)
        message, path = compare_state_call(call, live), None
        if message:
            folder = Path(dump_dir or env.read("ATTNLIB_DUMP_DIR"))
            path = save_state_recording(call, new_path(folder, name, number))
        return ShadowRecord(name, number, error, message=message, path=path)

    return compare


@contextmanager
def shadow(
    backend: str | Backend = "torch", *, every: int = 1, dump_dir: str | Path | None = None
) -> Iterator[ShadowLog]:
    """Compare a sample of all calls of `Attention` and `StateLayer` of this process inside the
    `with` block.

    Args:
        backend: the second backend.
        every: compare the first call and then every `every`-th call of each layer.
        dump_dir: folder for recordings of results above the budget; None means ATTNLIB_DUMP_DIR.

    Raises:
        ContractError: `every` is less than 1.
    """
    every = as_count("every", every, 1)
    dump_dir = None if dump_dir is None else as_path(dump_dir)
    loaded = load_backend(backend)
    log, counted = ShadowLog(loaded.get_name()), CountedCalls()

    def observe(layer: Any, *call: Any) -> None:
        name, number = counted.next(layer)
        log.calls += 1
        if number % every == 0:
            record = shadow_call(layer, loaded, *call, name=name, number=number, dump_dir=dump_dir)
            log.records.append(record)

    states = StateSampler(every)

    def observe_state(layer: Any, part: str, *call: Any) -> Callable[[], None] | None:
        log.calls += 1
        if (place := states.sampled(layer, part)) is None:
            return None
        done = shadow_state_call(layer, loaded, part, *call, place=place, dump_dir=dump_dir)
        return lambda: log.records.append(done())

    OBSERVERS.append(observe)
    STATE_OBSERVERS.append(observe_state)
    try:
        yield log
    finally:
        OBSERVERS.remove(observe)
        STATE_OBSERVERS.remove(observe_state)


def enable_validation_shadow() -> None:
    """ATTNLIB_VALIDATE=2: compare all later calls with `torch`; warn if one is above the budget."""
    if _validate not in OBSERVERS:
        OBSERVERS.append(_validate)
        STATE_OBSERVERS.append(_validate_state)


def _validate(layer: Any, *call: Any) -> None:
    if env.read("ATTNLIB_VALIDATE") != 2 or layer.backend.get_name() == "torch":
        return
    _warn(layer, shadow_call(layer, load_backend("torch"), *call))


def _validate_state(layer: Any, *call: Any) -> Callable[[], None] | None:
    if env.read("ATTNLIB_VALIDATE") != 2 or layer.backend.get_name() == "torch":
        return None
    done = shadow_state_call(layer, load_backend("torch"), *call)
    return lambda: _warn(layer, done())


def _warn(layer: Any, record: ShadowRecord) -> None:
    if record.message:
        warnings.warn(
            f"{record.layer} on {layer.backend.get_name()} differs from the torch backend: "
            f"{record.message}; the call is recorded in {record.path}: run it again with "
            "`attnlib replay`",
            stacklevel=2,
        )
