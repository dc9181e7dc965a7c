"""The request and the key tiles of a program."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from attnlib.ops.triton.kernels.arguments import AttentionConfig, Batch, Mask
from attnlib.ops.triton.kernels.schedule import find_request, request_tiles, tiles_per_split


@triton.jit
def _find_kernel(starts, found, num_reqs, TILE_TOKENS: tl.constexpr, LANES: tl.constexpr):
    tile = tl.program_id(0)
    tl.store(found + tile, find_request(starts, tile, num_reqs, TILE_TOKENS, LANES))


@triton.jit
def _split_kernel(
    starts, seq_lens, out, num_reqs, num_splits, waves, LANES: tl.constexpr, CONFIG: tl.constexpr
):
    request = tl.program_id(0)
    batch = Batch(starts, seq_lens, seq_lens, num_reqs, num_reqs)
    mask = Mask(0, 0, 0)
    _, own = request_tiles(batch, request, True, mask, (), None, CONFIG)
    per_split = tiles_per_split(batch, own, num_splits, waves, mask, (), None, LANES, CONFIG)
    tl.store(out + request * 2, own)
    tl.store(out + request * 2 + 1, per_split)


def _splits(
    device: torch.device, seq_lens: list[int], num_splits: int, waves: float, balanced: bool
) -> list[tuple[int, int]]:
    """Return (tiles, splits used) of each request of a decode batch."""
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=device)
    out = torch.zeros(len(seq_lens), 2, dtype=torch.int32, device=device)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    config = AttentionConfig(
        BLOCK_M=16, BLOCK_N=64, TILE_HEADS=1, TILE_TOKENS=1, HEAD_BLOCKS=1, GROUP=1,
        COMPUTE=tl.float32, CAUSAL=1, BALANCED=balanced, MIN_TILES=2, MAX_SPLITS=128,
    )  # fmt: skip
    _split_kernel[(len(seq_lens),)](
        starts, lengths, out, len(seq_lens), num_splits, waves, 16, config
    )
    return [(own, -(-own // per_split)) for own, per_split in out.tolist()]


@pytest.mark.parametrize("tile_tokens", [1, 5, 16])
@pytest.mark.parametrize("lanes", [4, 128])
def test_every_token_is_in_a_tile_of_its_request(
    device: torch.device, tile_tokens: int, lanes: int
) -> None:
    """The tiles cover the tokens of every request and the rows after the last request."""
    query_lens = [0, 7, 0, 0, 33, 1, 16, 0]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tokens = int(starts[-1]) + 21
    tiles = tokens // tile_tokens + len(query_lens) + 1
    found = torch.full((tiles,), -1, dtype=torch.int32, device=device)
    _find_kernel[(tiles,)](starts.to(device), found, len(query_lens), tile_tokens, lanes)
    covered = []
    bounds = [*starts.tolist(), tokens]
    for tile, request in enumerate(found.tolist()):
        first = bounds[request] + (tile - bounds[request] // tile_tokens - request) * tile_tokens
        covered += range(first, min(first + tile_tokens, bounds[request + 1]))
    assert covered == list(range(tokens))


def test_fixed_number_of_splits_per_request(device: torch.device) -> None:
    """D1: without balancing every request has the same number of splits, if it has the tiles."""
    assert _splits(device, [640, 64, 0, 6400], 4, 0.1, False) == [(10, 4), (1, 1), (0, 0), (100, 4)]


def test_a_uniform_batch_is_one_wave(device: torch.device) -> None:
    """Eight requests of 8k with 33 resident programs per KV head: four splits each, 32 programs."""
    assert _splits(device, [8192] * 8, 16, 1 / 33, True) == [(128, 4)] * 8


@pytest.mark.slow
def test_a_full_batch_is_not_split(device: torch.device) -> None:
    """Requests that make almost two waves by themselves are not split."""
    assert _splits(device, [8192] * 64, 4, 1 / 33, True) == [(128, 1)] * 64


def test_ragged_batches_split_by_work(device: torch.device) -> None:
    """One long request uses the whole chip; the short ones have one split."""
    (long, long_splits), *short = _splits(device, [32768] + [200] * 15, 33, 1 / 33, True)
    assert long == 512 and long_splits >= 16
    assert short == [(4, 1)] * 15


@pytest.mark.slow
def test_number_of_splits_is_bounded(device: torch.device) -> None:
    """No request uses more splits than the grid has, for random lengths."""
    generator = torch.Generator().manual_seed(0)
    for num_splits in (1, 2, 5, 16):
        lengths = (torch.rand(40, generator=generator) ** 4 * 30000).int().tolist()
        used = [splits for _, splits in _splits(device, lengths, num_splits, 1 / 50, True)]
        assert max(used) <= num_splits
