"""Tiles of keys that a threshold leaves out."""

from __future__ import annotations

import math

import pytest
import torch

from attnlib.ops.torch.skipping import KEY_TILE, left_out_keys


def _logits(*maxima: float, heads: int = 2, rows: int = 3) -> torch.Tensor:
    """One tile for each maximum; only its last key has it."""
    logits = torch.full((heads, rows, len(maxima) * KEY_TILE), -50.0)
    for tile, maximum in enumerate(maxima):
        logits[:, :, (tile + 1) * KEY_TILE - 1] = maximum
    return logits


def _left_out(logits: torch.Tensor, threshold: float, **options: int) -> list[bool]:
    """Whether each tile is left out; the keys of a tile share this."""
    keys = left_out_keys(logits, options.get("num_kv_heads", 1), threshold, 0)
    tiles = keys.view(*keys.shape[:2], -1, KEY_TILE)
    assert (tiles == tiles[:1, :1, :, :1]).all()
    found: list[bool] = tiles[0, 0, :, 0].tolist()
    return found


def test_tiles_below_the_largest_so_far_are_left_out() -> None:
    logits = _logits(0.0, 5.0, 1.9, 2.1, 9.0, 5.9)
    assert _left_out(logits, math.exp(-3)) == [False, False, True, False, False, True]


def test_the_first_visible_tile_is_kept() -> None:
    assert _left_out(_logits(-math.inf, -40.0, 0.0), 0.5)[1:] == [False, False]


def test_one_row_with_a_large_weight_keeps_the_tile_for_all() -> None:
    logits = _logits(5.0, 0.0)
    logits[1, 2, -1] = 5.0
    assert _left_out(logits, 0.01) == [False, False]


def test_heads_of_other_kv_heads_decide_for_themselves() -> None:
    logits = _logits(5.0, 0.0)
    logits[1, 2, -1] = 5.0
    keys = left_out_keys(logits, 2, 0.01, 0)
    assert keys[0, :, KEY_TILE:].all() and not keys[1].any()


def test_rows_that_see_no_key_of_a_tile_have_no_part_in_the_decision() -> None:
    logits = _logits(5.0, 0.0)
    logits[:, 0] = -math.inf
    assert left_out_keys(logits, 1, 0.01, 0)[:, 1:, KEY_TILE:].all()


def test_tiles_start_at_multiples_from_position_0() -> None:
    logits = _logits(5.0, 0.0, 0.0)[:, :, 10:]
    keys = left_out_keys(logits, 1, 0.01, 10)
    assert not keys[:, :, : KEY_TILE - 10].any() and keys[:, :, KEY_TILE - 10 :].all()


def test_a_tile_with_nan_is_kept() -> None:
    logits = _logits(5.0, 0.0)
    logits[:, :, -1] = math.nan
    assert _left_out(logits, 0.01) == [False, False]


@pytest.mark.parametrize("threshold", [2.0**-4, 2.0**-10])
def test_left_out_keys_have_weights_below_the_threshold(threshold: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 100, 500, generator=generator)
    logits *= torch.tensor([6.0, 0.5, 1.0, 0.2])[torch.arange(500) // KEY_TILE % 4]
    keys = left_out_keys(logits, 2, threshold, 0)
    relative = (logits - logits.amax(-1, keepdim=True)).exp()
    assert keys.any() and (relative[keys] < threshold).all()
