"""The tile of the kernel that combines the splits of decodes over latents."""

from __future__ import annotations

import pytest

from attnlib.ops.triton.hopper.latent_plan import _combine_tile


@pytest.mark.parametrize("heads", [1, 5, 16, 128])
def test_loads_fit_registers_and_variants_follow_powers_of_2(heads: int) -> None:
    """At most 64 registers of each thread; batches between powers of 2 need no other kernel."""
    group, ranges = min(heads, 64), 132 if heads <= 64 else 66
    tiles = {}
    for num_reqs in range(1, 300):
        tile = _combine_tile(num_reqs, num_reqs * heads, group, 512, ranges)
        loaded = tile["STEP"] * tile["HEADS"] * tile["DV_PAD"]
        assert loaded <= 64 * 32 * tile["num_warps"] and tile["DV_PAD"] * tile["PARTS"] == 512
        tiles[num_reqs] = tile
    for num_reqs, tile in tiles.items():
        above = 1 << (num_reqs - 1).bit_length()
        assert tile in (tiles.get(above, tile), tiles[max(1, above // 2)])


def test_few_requests_load_many_splits_together() -> None:
    """One request has all ranges, and 16 have a few each."""
    assert _combine_tile(1, 16, 16, 512, 132)["STEP"] == 64
    assert _combine_tile(16, 256, 16, 512, 132)["STEP"] == 16
    assert _combine_tile(32, 4096, 64, 512, 66)["PARTS"] == 1
    many = _combine_tile(64, 1024, 16, 512, 132)
    assert (many["STEP"], many["PARTS"], many["num_warps"]) == (8, 1, 2)
