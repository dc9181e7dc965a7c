"""Replay a recorded call on any backend, and reduce a failing one.

`shrink` removes requests, then query tokens from the front and the back, as long as the rest still
fails. Every smaller batch is a slice of the recorded batch over the same cache blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.debug.state_calls import RecordedStateCall, StateOutcome
from attnlib.debug.state_runs import compare_state_call, run_state_call
from attnlib.testing.backend_under_test import load_backend
from attnlib.testing.batch_slicing import slice_batch
from attnlib.testing.inputs import stored_heads
from attnlib.testing.layouts import allocate_views, write_slots
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.outcome import UnsupportedCase
from attnlib.testing.runner import AttentionOutput, compare_with_oracle, run_materialized_case
from attnlib.testing.tensor_io import pack_cache_views, unpack_cache_views

__all__ = ["ReplayResult", "replay", "replay_state", "shrink", "shrink_state"]

Backend = type[AttentionBackend]


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        backend: name of the backend.
        batch: the batch in the notation of `attnlib.testing.batch_spec`.
        message: "" if the result is within budget, otherwise the errors and the case.
        output: the output of the backend, with states of a state layer; None if it raised an
            exception.
    """

    backend: str
    batch: str
    message: str
    output: AttentionOutput | StateOutcome | None

    @property
    def passed(self) -> bool:
        """True if the result is within the error budget."""
        return not self.message

    def __str__(self) -> str:
        """The result in one line."""
        return f"{self.backend} on {self.batch}: {self.message or 'within the error budget'}"


def _copy_cache(step: MaterializedCase) -> MaterializedCase:
    """The step with a copy of its cache, so that writes do not modify the recording."""
    cache = step.inputs.cache
    if cache.scales is not None:  # the scales are in the pages
        pages = allocate_views(step.inputs.dims, cache.key.shape[0], cache.layout, cache.key.device)
        pages.storage[0].copy_(cache.storage[0])
        assert pages.scales is not None  # dims name the format
        params = replace(step.params, k_scale=pages.scales[0], v_scale=pages.scales[1])
        return replace(step, inputs=replace(step.inputs, cache=pages), params=params)
    blocks = torch.arange(cache.key.shape[0], device=cache.key.device)
    key, value = unpack_cache_views(pack_cache_views(cache.key, cache.value, blocks), blocks.device)
    return replace(step, inputs=replace(step.inputs, cache=replace(cache, key=key, value=value)))


def _with_written_kv(step: MaterializedCase) -> MaterializedCase:
    """The step with its keys and values in a copy of the cache, written by reference code."""
    if step.inputs.kv_written:
        return step
    step = _copy_cache(step)
    inputs, slots = step.inputs, step.inputs.written_slots()
    rows = inputs.slot_mapping >= 0
    new = stored_heads(inputs.dims, inputs.key[rows], inputs.value[rows])
    names = inputs.dims.side_formats
    write_slots(inputs.cache.key, slots, new[0], step.params.k_scale, names[0])
    if not step.spec.use_mla:
        write_slots(inputs.cache.value, slots, new[1], step.params.v_scale, names[1])
    return replace(step, inputs=replace(inputs, kv_written=True))


def replay(step: MaterializedCase, backend: str | Backend) -> ReplayResult:
    """Run a recorded step on a backend and compare the result with the oracle.

    Raises:
        UnsupportedCase: the backend declares that it does not support the case.
    """
    loaded = load_backend(backend)
    device = step.inputs.query.device
    if reasons := loaded.validate_configuration(step.spec, device):
        raise UnsupportedCase(reasons)
    try:
        output = run_materialized_case(loaded, _copy_outputs(step))
    except Exception as error:
        message = f"raised {type(error).__name__}: {error}"
        return ReplayResult(loaded.get_name(), str(step.inputs.batch), message, None)
    message = compare_with_oracle(step.case, output, device, reference=_with_written_kv(step))
    return ReplayResult(loaded.get_name(), str(step.inputs.batch), message, output)


def replay_state(call: RecordedStateCall, backend: str | Backend) -> ReplayResult:
    """Run a recorded call of a state layer on a backend, and compare outputs and states with the
    oracle.

    Raises:
        UnsupportedCase: as `run_state_call`.
    """
    loaded, batch = load_backend(backend), str(call)
    name = loaded.get_name()
    try:
        output = run_state_call(call, loaded)
    except UnsupportedCase:
        raise
    except Exception as error:
        return ReplayResult(name, batch, f"raised {type(error).__name__}: {error}", None)
    return ReplayResult(name, batch, compare_state_call(call, output), output)


def _copy_outputs(step: MaterializedCase) -> MaterializedCase:
    """The step with a copy of its cache and an empty output."""
    out = torch.full_like(step.inputs.out, float("nan"))
    step = _copy_cache(step)
    return replace(step, inputs=replace(step.inputs, out=out))


def shrink(step: MaterializedCase, fails: Callable[[MaterializedCase], bool]) -> MaterializedCase:
    """Reduce a failing step.

    Args:
        step: the recorded step.
        fails: returns True if a step fails, for example
            `lambda step: not replay(step, "my_backend").passed`.

    Returns:
        The smallest slice found that still fails; `step` itself if it does not fail.
    """
    if not fails(step):
        return step
    smaller = _fewer_requests(step, fails)
    return _fewer_tokens(smaller, fails)


def shrink_state(
    call: RecordedStateCall, fails: Callable[[RecordedStateCall], bool]
) -> RecordedStateCall:
    """Remove requests of a failing call of a state layer as long as the rest still fails."""
    if not fails(call):
        return call
    kept = _fewer(len(call.slots), lambda requests: fails(call.selected(requests)))
    return call.selected(kept)


def _fewer_requests(
    step: MaterializedCase, fails: Callable[[MaterializedCase], bool]
) -> MaterializedCase:
    count = step.inputs.batch.num_reqs
    return slice_batch(step, _fewer(count, lambda requests: fails(slice_batch(step, requests))))


def _fewer(count: int, fails: Callable[[list[int]], bool]) -> list[int]:
    """Remove halves, quarters, ... and single requests while the rest fails (delta debugging)."""
    kept = list(range(count))
    size = len(kept)
    while size > 1:
        size = max(size // 2, 1)
        start = 0
        while start < len(kept) and len(kept) > 1:
            rest = kept[:start] + kept[start + size :]
            if rest and fails(rest):
                kept = rest
            else:
                start += size
    return kept


def _fewer_tokens(
    step: MaterializedCase, fails: Callable[[MaterializedCase], bool]
) -> MaterializedCase:
    """Halve each query from the front and from the back while the batch fails."""
    spans = [(0, query_len) for query_len in step.inputs.batch.query_lens]
    requests = list(range(len(spans)))
    for request in requests:
        progress = True
        while progress:
            progress = False
            start, stop = spans[request]
            for half in (start + (stop - start + 1) // 2, start + 1):
                for candidate in ((half, stop), (start, half)):
                    trial = [*spans[:request], candidate, *spans[request + 1 :]]
                    useful = (
                        start < stop and candidate[0] < candidate[1] and candidate != (start, stop)
                    )
                    if useful and fails(slice_batch(step, requests, trial)):
                        spans, progress = trial, True
                        break
                if progress:
                    break
    return slice_batch(step, requests, spans)
