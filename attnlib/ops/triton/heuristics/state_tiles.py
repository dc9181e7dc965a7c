"""Value rows of a program of the recurrence over states, and its warps.

Both depend on the layer only, because the bits of an output must not depend on the batch (T18).
"""

from __future__ import annotations

from typing import NamedTuple

import triton

from attnlib.ops.states.layout import POSITION_COPIES

__all__ = ["LARGEST_CHUNK", "LARGEST_HEAD", "StateTile", "state_tile"]

LARGEST_HEAD = 256
"""Largest key and value size: a program keeps its rows of the state in registers."""
LARGEST_CHUNK = 32
"""Tokens of a chunk. With 64, kernels of 128 keys spill 1600 to 3800 bytes per thread on sm_89."""
_MOST_ROWS = 64
_MOST_COLUMNS = 32


class StateTile(NamedTuple):
    """A tile of a state.

    Attributes:
        rows: value rows of a program, a power of two of at least 16.
        part, parts: columns of the keys that are multiplied at a time, and their number.
        blocks: programs of a head, at most `POSITION_COPIES`.
        num_warps: of a program.
    """

    rows: int
    part: int
    parts: int
    blocks: int
    num_warps: int


def state_tile(key_size: int, value_size: int) -> StateTile:
    """The tile of heads of this size, both at most `LARGEST_HEAD`."""
    part = min(_MOST_COLUMNS, max(16, triton.next_power_of_2(key_size)))
    rows = min(_MOST_ROWS, max(16, triton.next_power_of_2(value_size)))
    if key_size > 128 and value_size <= 128:
        rows = min(rows, 32)  # as many registers as 64 rows of 128 keys
    parts, blocks = triton.cdiv(key_size, part), triton.cdiv(value_size, rows)
    assert blocks <= POSITION_COPIES
    # Products of float32 hold each operand in two parts, so a warp has 8 columns of 64.
    return StateTile(rows, part, parts, blocks, 8 if rows == _MOST_ROWS else 4)
