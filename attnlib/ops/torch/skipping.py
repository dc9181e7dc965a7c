"""Tiles of keys that a threshold of weights leaves out (M18), on explicit scores."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import pad

__all__ = ["KEY_TILE", "ROW_TILE", "left_out_keys"]

KEY_TILE = 64
"""Keys of a tile. Tiles start at multiples of it from position 0."""
ROW_TILE = 64
"""Rows (query heads of one KV head, times query tokens) that decide about a tile together."""


def left_out_keys(logits: Tensor, num_kv_heads: int, threshold: float, start: int) -> Tensor:
    """The keys that are left out, as the Triton kernels do it: tile by tile from the left.

    A tile is left out if, in all rows of a row tile, its largest weight relative to the largest
    weight of the row so far is below the threshold (BLASST, Yuan et al. 2025). A tile with NaN is
    kept.

    Args:
        logits: `[Hq, L, S]`, -inf where hidden.
        num_kv_heads: Hkv, divides Hq.
        threshold: above 0 and below 1.
        start: position of the first key.

    Returns:
        `[Hq, L, S]` bool, True for keys that are left out.
    """
    num_heads, num_rows, num_keys = logits.shape
    group, before = num_heads // num_kv_heads, start % KEY_TILE
    tokens = max(1, ROW_TILE // group)
    num_tiles, num_blocks = -(-(before + num_keys) // KEY_TILE), -(-num_rows // tokens)
    after = num_tiles * KEY_TILE - before - num_keys
    padded = pad(logits, (before, after, 0, num_blocks * tokens - num_rows), value=-math.inf)
    shape = (num_kv_heads, group, num_blocks, tokens, num_tiles, KEY_TILE)
    largest = padded.view(shape).amax(-1)
    # -inf before the first tile, against which no tile is small.
    so_far = pad(largest.cummax(-1).values[..., :-1], (1, 0), value=-math.inf)
    is_small = largest < so_far + math.log(threshold)
    # Rows that see no key of a tile have no part in the decision, as those that pad the last block.
    is_small |= largest == -math.inf
    left_out = is_small.all(dim=3, keepdim=True).all(dim=1, keepdim=True)
    keys = left_out.expand(num_kv_heads, group, num_blocks, tokens, num_tiles).repeat_interleave(
        KEY_TILE, dim=-1
    )
    return keys.reshape(num_heads, -1, num_tiles * KEY_TILE)[
        :, :num_rows, before : before + num_keys
    ]
