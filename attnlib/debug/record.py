"""Record attention calls of a running layer in files that can be replayed on any backend.

    with record_calls("recordings", every=100):
        model.generate(...)

A recording holds only the cache blocks that the batch uses. All tensors keep their strides, so that
layout errors can be reproduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnlib.debug.capture import capture_call, capture_layer_call
from attnlib.debug.counted_calls import CountedCalls, StateSampler, new_path
from attnlib.debug.recording import load_recording, save_recording
from attnlib.debug.recording_files import as_folder
from attnlib.debug.state_calls import capture_state_call, save_state_recording
from attnlib.instrumentation import OBSERVERS, STATE_OBSERVERS
from attnlib.metadata.base import AttentionMetadata
from attnlib.ops.addresses import as_count

__all__ = [
    "capture_call",
    "capture_layer_call",
    "load_recording",
    "record_calls",
    "save_recording",
]


@contextmanager
def record_calls(folder: str | Path, *, every: int = 1) -> Iterator[list[Path]]:
    """Record calls of `Attention` and `StateLayer` of this process inside the `with` block.

    The files are `LAYER-NUMBER.pt`, with the prefix of the layer, for `attnlib audit-kv
    --recordings` and `attnlib replay`. Further layers of one prefix are `PREFIX.1`, `PREFIX.2`, and
    a file that exists is not overwritten. Calls without a cache and replays of CUDA graphs are not
    recorded.

    Args:
        folder: is created if necessary.
        every: record the first call and then every `every`-th call of each layer.

    Yields:
        The files written so far.

    Raises:
        ContractError: `every` is less than 1, the folder cannot be created, or a call cannot be
            recorded (`capture_call`).
    """
    every, folder = as_count("every", every, 1), as_folder(folder)
    files: list[Path] = []
    counted = CountedCalls()

    def observe(
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        cache: Any,
        metadata: AttentionMetadata,
        output: Any,
        lse: Any,
    ) -> None:
        if cache is None:
            return
        name, number = counted.next(layer)
        if number % every == 0:
            step = capture_layer_call(
                layer, query, key, value, cache, metadata, needs_lse=lse is not None
            )
            files.append(save_recording(step, new_path(folder, name, number)))

    states = StateSampler(every)

    def observe_state(layer: Any, part: str, *call: Any) -> None:
        if (place := states.sampled(layer, part)) is not None:
            captured = capture_state_call(layer, part, *call[:-1])
            files.append(save_state_recording(captured, new_path(folder, *place)))

    OBSERVERS.append(observe)
    STATE_OBSERVERS.append(observe_state)
    try:
        yield files
    finally:
        OBSERVERS.remove(observe)
        STATE_OBSERVERS.remove(observe_state)
