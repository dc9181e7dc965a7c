"""The tile of the kernel that combines the splits of decodes over latents."""

from __future__ import annotations

import pytest

from attnlib.ops.triton.hopper.latent_plan import _combine_tile


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
    assert _tile(32, 32, 128)["PARTS"] == 1
    many = _tile(64, 64, 16)
    assert (many["STEP"], many["PARTS"], many["num_warps"]) == (8, 1, 2)
