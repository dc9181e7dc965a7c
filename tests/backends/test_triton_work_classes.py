"""Decode tiles that depend on the class of work: workspace and warm-up cover every batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attnlib.backends.triton import TritonBackend
from attnlib.layer.warmup_batches import warmup_batches
from attnlib.ops.triton.heuristics.choose_tiles import TileRequest, choose_decode_tile
from attnlib.ops.triton.heuristics.device import limits_of, set_tuned_tiles
from attnlib.ops.triton.heuristics.tile_table import parse_table, work_class
from attnlib.ops.triton.paged_decode import paged_decode_num_splits, paged_decode_workspace_bytes
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype=torch.float16)
LIMITS = BatchLimits(max_num_reqs=24, max_num_tokens=24, max_seq_len=3000)
if torch.cuda.is_available():
    pytest.skip("needs the limits of the interpreter", allow_module_level=True)


@pytest.fixture(autouse=True)
def _tiles_by_work() -> Iterator[None]:
    """Tiles of 16 keys for small batches, which allow more splits, up to 128 for large batches."""
    lines = [
        {
            "op": "decode",
            "keys_per_sm": span,
            "tile": {"block_m": 16, "block_n": block_n, "num_warps": 4, "num_stages": 2},
            "provenance": "here",
        }
        for span, block_n in (([0, 256], 16), ([257, 4096], 32), ([4097, None], 128))
    ]
    set_tuned_tiles(
        -1, parse_table({"schema": 1, "chip": "x", "provenance": {"here": ""}, "tiles": lines}, "x")
    )
    yield
    set_tuned_tiles(-1, None)


def _splits(reqs: int, seq_len: int) -> int:
    query = torch.empty(0, SPEC.num_heads, SPEC.head_size, dtype=SPEC.dtype)
    cache = torch.empty(0, SPEC.block_size, SPEC.num_kv_heads, SPEC.head_size, dtype=SPEC.dtype)
    return paged_decode_num_splits(
        query, cache, SPEC.head_size, num_reqs=reqs, max_query_len=1, max_seq_len=seq_len
    )


def _compiled_kernel(reqs: int, seq_len: int) -> tuple[int, bool]:
    """(keys per tile, True if keys are split), which select the compiled kernel."""
    chip = limits_of(torch.empty(0))
    work = work_class(reqs, SPEC.num_kv_heads, seq_len, chip.num_sms)
    tile = choose_decode_tile(
        TileRequest((32, 32), (2, 2), 2, chip.shared_memory, chip.products, tuned=chip.tuned),
        keys_per_sm=work,
    )
    return tile.block_n, _splits(reqs, seq_len) > 1


def test_declared_workspace_holds_every_batch_within_the_limits() -> None:
    """M7, speed rules: the size is declared before the first step, for all work classes."""
    declared = TritonBackend.make_builder(SPEC, "cpu", limits=LIMITS).workspace_bytes
    needed = 0
    for reqs in range(1, LIMITS.max_num_reqs + 1):
        for seq_len in range(1, LIMITS.max_seq_len + 1, 7):
            needed = max(
                needed,
                paged_decode_workspace_bytes(
                    reqs, SPEC.num_heads, SPEC.head_size, _splits(reqs, seq_len)
                ),
            )
    longest = max(
        paged_decode_workspace_bytes(
            reqs, SPEC.num_heads, SPEC.head_size, _splits(reqs, LIMITS.max_seq_len)
        )
        for reqs in range(1, 25)
    )
    assert 0 < needed <= declared and declared >= longest


def test_the_warm_up_runs_every_tile_that_a_batch_within_the_limits_can_use() -> None:
    """P1: nothing is compiled afterwards."""
    builder = TritonBackend.make_builder(SPEC, "cpu", limits=LIMITS)
    warmed = {
        _compiled_kernel(len(lengths), bound)
        for lengths in warmup_batches(LIMITS, 8)
        if set(lengths) == {1}
        for bound in builder.seq_len_bounds(len(lengths), 1, LIMITS.max_seq_len)
    }
    possible = {
        _compiled_kernel(reqs, seq_len)
        for reqs in range(1, LIMITS.max_num_reqs + 1)
        for seq_len in range(1, LIMITS.max_seq_len + 1, 3)
    }
    assert len({block_n for block_n, _ in possible}) == 3
    assert possible <= warmed, possible - warmed


def test_without_such_tiles_two_bounds_are_enough() -> None:
    set_tuned_tiles(-1, None)
    builder = TritonBackend.make_builder(SPEC, "cpu", limits=LIMITS)
    assert builder.seq_len_bounds(4, 1, 3000) == [1, 3000] and builder.seq_len_bounds(4, 7, 7) == [
        7
    ]
