"""Run a recording on any backend, and find the smallest part of it that still fails.

Shrinking drops requests, then query tokens (from the front, then from the back), as long as what is left still fails.
Nothing is invented on the way: every smaller batch is a part of the recorded one over the same pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.testing.backend_under_test import load_backend
from attnlib.testing.batch_slicing import slice_batch
from attnlib.testing.layouts import write_slots
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.outcome import UnsupportedCase
from attnlib.testing.runner import AttentionOutput, compare_with_oracle, run_materialized_case
from attnlib.testing.tensor_io import pack_cache_views, unpack_cache_views

__all__ = ["ReplayResult", "replay", "shrink"]

Backend = type[AttentionBackend]


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found.

    Attributes:
        backend: its name; batch: what was run, in the grammar of batches.
        message: "" within budget, else both errors and the case.
        seen: what the backend gave, None when it raised.
    """

    backend: str
    batch: str
    message: str
    seen: AttentionOutput | None

    @property
    def passed(self) -> bool:
        """Within budget of the oracle."""
        return not self.message

    def __str__(self) -> str:
        """One line."""
        return f"{self.backend} on {self.batch}: {self.message or 'within budget of the oracle'}"


def _written(step: MaterializedCase) -> MaterializedCase:
    """The same step with its keys in the cache, put there by the kit."""
    if step.inputs.kv_written:
        return step
    pages = torch.arange(step.inputs.cache.key.shape[0], device=step.inputs.cache.key.device)
    key, value = unpack_cache_views(
        pack_cache_views(step.inputs.cache.key, step.inputs.cache.value, pages), pages.device
    )
    kept = step.inputs.slot_mapping >= 0
    slots = step.inputs.written_slots()
    write_slots(key, slots, step.inputs.key[kept], step.params.k_scale)
    if not step.spec.use_mla:
        write_slots(value, slots, step.inputs.value[kept], step.params.v_scale)
    views = replace(step.inputs.cache, key=key, value=value)
    return replace(step, inputs=replace(step.inputs, cache=views, kv_written=True))


def replay(step: MaterializedCase, backend: str | Backend) -> ReplayResult:
    """Run a recorded step on a backend and hold the result against the oracle.

    Raises:
        UnsupportedCase: the backend declares that it cannot.
    """
    loaded = load_backend(backend)
    device = step.inputs.query.device
    if reasons := loaded.validate_configuration(step.spec, device):
        raise UnsupportedCase(reasons)
    try:
        seen = run_materialized_case(loaded, _fresh(step))
    except Exception as error:
        message = f"raised {type(error).__name__}: {error}"
        return ReplayResult(loaded.get_name(), str(step.inputs.batch), message, None)
    message = compare_with_oracle(step.case, seen, device, truth=_written(step))
    return ReplayResult(loaded.get_name(), str(step.inputs.batch), message, seen)


def _fresh(step: MaterializedCase) -> MaterializedCase:
    """The step with an output and a cache of its own, so that replaying changes nothing."""
    pages = torch.arange(step.inputs.cache.key.shape[0], device=step.inputs.cache.key.device)
    key, value = unpack_cache_views(
        pack_cache_views(step.inputs.cache.key, step.inputs.cache.value, pages), pages.device
    )
    out = torch.full_like(step.inputs.out, float("nan"))
    return replace(
        step,
        inputs=replace(
            step.inputs, cache=replace(step.inputs.cache, key=key, value=value), out=out
        ),
    )


def shrink(step: MaterializedCase, fails: Callable[[MaterializedCase], bool]) -> MaterializedCase:
    """The smallest part of a failing step that still fails.

    Args:
        fails: says whether a step fails, for instance `lambda s: not replay(s, "my_backend").passed`.

    Returns:
        the step itself when it does not fail.
    """
    if not fails(step):
        return step
    smaller = _fewer_requests(step, fails)
    return _fewer_tokens(smaller, fails)


def _fewer_requests(
    step: MaterializedCase, fails: Callable[[MaterializedCase], bool]
) -> MaterializedCase:
    """Drop halves, then quarters, and so on down to single requests, while the rest fails (delta debugging)."""
    kept = list(range(step.inputs.batch.num_reqs))
    size = len(kept)
    while size > 1:
        size = max(size // 2, 1)
        start = 0
        while start < len(kept) and len(kept) > 1:
            rest = kept[:start] + kept[start + size :]
            if rest and fails(slice_batch(step, rest)):
                kept = rest
            else:
                start += size
    return slice_batch(step, kept)


def _fewer_tokens(
    step: MaterializedCase, fails: Callable[[MaterializedCase], bool]
) -> MaterializedCase:
    """Cut each request's query from the front and from the back by halves while the batch fails."""
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
