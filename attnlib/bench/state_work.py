"""Bytes that a step over states must move.

A decode depends on the length of its tail, so a timing goes over one whole chunk: every call
continues from another position. The bound of a call counts what a step in the tail form must read
and write once: the state and the tail, the new inputs, the outputs, and the state again where a
chunk is full.
"""

from __future__ import annotations

from attnlib.spec import StateSpec

__all__ = ["step_bytes", "surrounding_bytes"]


def step_bytes(spec: StateSpec, computed: int, query_len: int) -> int:
    """Bytes that a step of one request must move in the tail form.

    Args:
        spec: of the layer, with a chunk size.
        computed: tokens before the step, all of which stay; those since the last full chunk are in
            the tail.
        query_len: new tokens.
    """
    assert spec.chunk_size is not None
    size, chunk, end = spec.dtype.itemsize, spec.chunk_size, computed + query_len
    state = spec.num_heads * spec.key_size * spec.value_size * spec.state_dtype.itemsize
    channels = {"head": 1, "channel": spec.key_size, "constant": 0}[spec.decay]
    keys, values = spec.num_key_heads * spec.key_size, spec.num_heads * spec.value_size
    gates = 4 * spec.num_heads * (channels + spec.has_beta)
    row = size * (keys + values) + gates
    base = computed // chunk * chunk
    kept = max(computed, end - spec.max_rollback) // chunk * chunk
    written = end - max(kept, computed)
    moved = (computed - base + query_len + written) * row + query_len * size * (keys + values)
    return moved + state * ((base > 0) + (kept > base))


def surrounding_bytes(spec: StateSpec, query_len: int) -> int:
    """Bytes that a step of one request must move besides those of its recurrence: the window is
    read and written, and the output gate is read."""
    window = spec.conv_channels * (spec.conv_width - 1 + query_len)
    return spec.dtype.itemsize * (window + query_len * spec.num_heads * spec.value_size)
