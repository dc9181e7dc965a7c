"""A live call of a state layer, run again on a second backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attnlib import env
from attnlib.backends.base import AttentionBackend
from attnlib.cache.states import StateCache
from attnlib.debug.counted_calls import new_path
from attnlib.debug.shadow_log import ShadowRecord, difference, rounding_of
from attnlib.debug.state_calls import capture_state_call, live_outcome, save_state_recording
from attnlib.debug.state_runs import compare_state_call, run_state_call
from attnlib.metadata.states import StateMetadata
from attnlib.testing.outcome import UnsupportedCase

__all__ = ["shadow_state_call"]


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
        live, dtype = live_outcome(call, cache, metadata, output), call.spec.dtype
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
