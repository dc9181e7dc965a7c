"""Decodes over latents: tiles, workspaces, and the kernel that combines splits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from attnlib.backends.triton.declared import seq_len_bounds
from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton.decode_schedule import schedule_decode
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.hopper.latent_plan import (
    _combine_tile,
    _workspace_bytes,
    latent_decode_workspace_bytes,
)
from attnlib.ops.triton.hopper.latent_tiles import (
    FEW_KEYS,
    FEW_PACKED_KEYS,
    LatentTile,
    choose_latent_tile,
)
from attnlib.ops.triton.hopper.sizes import (
    LATENT_ROWS,
    LATENT_SIZES,
    latent_blocks,
    latent_head_blocks,
)

H200 = DeviceLimits(132, 227 << 10, 228 << 10, (9, 0), True)


def _tile(num_reqs: int, num_tokens: int, heads: int) -> dict[str, int]:
    return _combine_tile(num_reqs, num_tokens, heads, 512, 132 if heads <= 64 else 66)


@pytest.mark.parametrize("heads", [1, 5, 16, 128])
def test_loads_fit_registers_and_variants_follow_powers_of_2(heads: int) -> None:
    """At most 64 registers of each thread; batches and queries between powers of 2 need no
    other kernel."""
    for num_reqs in range(1, 300):
        above = 1 << (num_reqs - 1).bit_length()
        for tokens in {num_reqs * query_len // 2 for query_len in range(2, 17)}:
            tile = _tile(num_reqs, tokens, heads)
            loaded = tile["STEP"] * tile["HEADS"] * tile["DV_PAD"]
            assert loaded <= 64 * 32 * tile["num_warps"] and tile["DV_PAD"] * tile["PARTS"] == 512
            assert tile in [_tile(above, above << power, heads) for power in range(4)]


def test_few_requests_load_many_splits_together() -> None:
    """One request has all ranges, and 16 have a few each."""
    assert _tile(1, 1, 16)["STEP"] == 64
    assert _tile(16, 16, 16)["STEP"] == 16
    assert _tile(1, 4, 128)["STEP"] == 32  # four blocks of tokens, of 16 splits each
    assert _tile(32, 32, 128)["PARTS"] == 1
    many = _tile(64, 64, 16)
    assert (many["STEP"], many["PARTS"], many["num_warps"]) == (8, 1, 2)
    assert _tile(16, 32, 32) == _tile(16, 64, 16) == many  # of 8 splits each, or up to 10
    assert _tile(1, 2, 128) == _tile(1, 1, 64)  # 33 and 134 ranges


def test_programs_of_whole_requests_look_at_several_tokens() -> None:
    """Ranges of a block of query rows: 132, 66, 33 and 16, of which each has at most two requests
    on average where programs have one token."""
    tiles = [
        (_tile(66, 66, 64), _tile(64, 64, 64)),
        (_tile(64, 64, 128), _tile(32, 32, 128)),
        (_tile(32, 128, 64), _tile(16, 64, 64)),
        (_tile(16, 64, 128), _tile(8, 32, 128)),
    ]
    assert [("TOKENS" in many, "TOKENS" in few) for many, few in tiles] == [(True, False)] * 4


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("max_query_len", [1, 2, 5, 8])
@pytest.mark.parametrize("heads", [1, 5, 16, 20, 32, 64, 128])
def test_workspaces_hold_the_results_of_all_ranges(
    heads: int, max_query_len: int, is_quantized: bool
) -> None:
    """Also of shorter queries, for which a builder allocates no other workspace."""
    space = latent_decode_workspace_bytes(9, heads, max_query_len, 132, is_quantized)
    for query_len in range(1, max_query_len + 1):
        blocks, head_blocks = latent_blocks(heads, query_len), latent_head_blocks(heads)
        group = heads // head_blocks
        rows = group * min(query_len, LATENT_ROWS // group)
        few = choose_latent_tile(rows, blocks, is_quantized, keys_per_sm=1)
        assert few.ranges <= choose_latent_tile(rows, blocks, is_quantized).ranges
        tile = choose_latent_tile(rows, blocks, is_quantized)
        ranges = 132 // blocks * blocks * tile.ranges
        assert _workspace_bytes(ranges, rows, 9 * head_blocks) <= space


def _swap_shared_bytes(tile: LatentTile, is_quantized: bool, group_scales: bool) -> int:
    """Shared memory of a CTA in which latents are the rows of the products, in bytes, without
    barriers and what Triton adds."""
    size, size_v = LATENT_SIZES
    latents, rotary, quarter = 64, size - size_v, size_v // 4
    is_quantized &= not tile.converts
    group_scales &= not tile.converts
    element = 1 if is_quantized else 2
    weights = 2 * latents * tile.rows * (4 if group_scales else 1)
    exchange = 4 * 5 * tile.rows if is_quantized or tile.converts or tile.rows > 16 else 0
    own = 2 * size * tile.rows + weights + exchange
    ring = tile.stages * latents * quarter * element
    scales = 4 * 4 * latents if group_scales else 0
    other = latents * rotary * (2 if group_scales else element) + scales
    return tile.workers * own + tile.ranges * (ring + tile.rotary_stages * other)


@pytest.mark.parametrize("keys_per_sm", [None, 1, FEW_PACKED_KEYS, FEW_KEYS, 4 * FEW_KEYS])
@pytest.mark.parametrize(
    ("is_quantized", "group_scales"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 64])
def test_tiles_fit_the_chip(
    rows: int, is_quantized: bool, group_scales: bool, keys_per_sm: int | None
) -> None:
    """Rows, shared memory with 2 KB for barriers and exchanges, and registers of the warpgroups, of
    which the first one gets those that the others leave."""
    tile = choose_latent_tile(rows, 1, is_quantized, group_scales, keys_per_sm)
    assert rows <= tile.rows * (tile.workers if tile.shares else 1)
    assert not tile.swaps or _swap_shared_bytes(tile, is_quantized, group_scales) <= 230700
    if tile.registers is None or not is_quantized:
        return
    loaders = 1 if tile.workers > 1 or tile.converts or not tile.swaps else 0
    others = (tile.workers - 1 if tile.swaps else 1) * tile.consumer_registers
    warpgroups = (tile.workers if tile.swaps else 2) + (loaders or 1)
    assert 128 * warpgroups * tile.registers <= 65536
    first = warpgroups * tile.registers - others - (loaders or 1) * tile.loader_registers
    assert 200 <= first <= 256
    # All quarters of a tile stay until the last product with them.
    assert tile.stages >= 4 + min(tile.in_flight, 4)


@pytest.mark.parametrize(("rows", "packed"), [(16, False), (16, True), (32, False)])
def test_few_keys_have_one_range_for_each_multiprocessor(rows: int, packed: bool) -> None:
    """Up to 16 rows where the tile may depend on the batch."""
    bound = FEW_PACKED_KEYS if packed else FEW_KEYS
    for work, ranges in ((1, 1), (bound, 1), (4 * bound, 2), (None, 2)):
        tile = choose_latent_tile(rows, 1, True, packed, work)
        assert tile.ranges == (1 if rows > 16 else ranges)


def test_a_batch_chooses_the_tile_by_its_work() -> None:
    """The launch key holds the class of work, and a warm-up visits both sides of its bound."""
    shape = LayerShape(
        *(16, 1, 576, 512, torch.bfloat16, torch.float8_e4m3fn), block_size=64, latent=True
    )
    bound = FEW_KEYS * H200.num_sms // 32
    for seq_len, few in ((bound, True), (bound + 1, False)):
        schedule = schedule_decode(shape, H200, num_reqs=32, max_query_len=1, visible=seq_len)
        keys = schedule.hopper_keys_per_sm
        assert schedule.uses_hopper and keys is not None and (keys <= FEW_KEYS) == few
    builder = cast(Any, SimpleNamespace(shape=shape, limits=H200))
    assert {bound, bound + 1} <= set(seq_len_bounds(builder, 32, 1, 1 << 20))
