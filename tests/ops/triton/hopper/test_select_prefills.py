"""Which Hopper prefills have tiles of one query head, and which read copies of keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from attnlib.layer.warmup_batches import long_batches, warmup_batches
from attnlib.ops.triton.hopper.converted_prefill import ConvertedPrefill, copied_rows
from attnlib.ops.triton.hopper.select_prefills import _fits_one_head
from attnlib.ops.triton.hopper.sizes import (
    CHUNK_TOKENS,
    COPIED_TOKENS,
    OTHER_BLOCK_TOKENS,
    SCALED_TOKENS,
)
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits
from tests.ops.triton.hopper.test_dispatch import _long_prefill


@pytest.mark.parametrize(
    ("group", "tokens", "window", "chunk", "fits"),
    [
        (5, 2048, (-1, 0), 0, True),
        (7, 9000, (-1, -1), 0, True),
        (5, 2047, (-1, 0), 0, False),
        (5, 9000, (127, 0), 0, False),
        (5, 9000, (-1, 0), 8192, False),
        (1, 9000, (-1, 0), 0, False),
        (4, 9000, (-1, 0), 0, False),
        (64, 9000, (-1, 0), 0, False),
        (128, 9000, (-1, 0), 0, False),
    ],
)
def test_long_prefills_of_groups_that_leave_rows_empty(
    group: int, tokens: int, window: tuple[int, int], chunk: int, fits: bool
) -> None:
    """Divisors and multiples of 64 rows fill a tile. Windows are shorter than tiles of one head."""
    params = SimpleNamespace(window=window, attention_chunk_size=chunk)
    call = SimpleNamespace(shape=SimpleNamespace(group=group), params=params, max_query_len=tokens)
    assert _fits_one_head(cast(Any, call)) == fits


@pytest.mark.parametrize(
    ("tokens", "reqs", "scales", "longest", "rows"),
    [
        (CHUNK_TOKENS, 1, False, 30_000, 32_768),
        (CHUNK_TOKENS - 1, 1, False, 30_000, 0),
        (CHUNK_TOKENS, 2, False, 30_000, 0),
        (COPIED_TOKENS, 2, False, 30_000, 65_536),
        (COPIED_TOKENS, 2, False, 40_000, 0),
        (COPIED_TOKENS, 0, False, 900, 0),  # rows of padding only
        (SCALED_TOKENS, 2, True, 900, 8_192),
        (SCALED_TOKENS - 1, 2, True, 900, 0),
        (SCALED_TOKENS, 1, True, 65_536, 65_536),
        (SCALED_TOKENS, 1, True, 65_537, 0),
    ],
)
def test_prefills_over_copies(
    tokens: int, reqs: int, scales: bool, longest: int, rows: int
) -> None:
    """Copies of at most 256 MiB; over elements that a prefill converts itself, long chunks of one
    request, which see all of the keys."""
    batch = SimpleNamespace(seq_lens=torch.zeros(reqs), max_seq_len=longest)
    seen = {"window": (-1, 0), "attention_chunk_size": 0}
    params = SimpleNamespace(scales_in_page=scales, score_function=None, **seen)
    key = torch.empty(1, 16, 8, 128, dtype=torch.float8_e4m3fn, device="meta")
    found = copied_rows(key, (128, 128), cast(Any, batch), cast(Any, params), tokens, 4)
    assert found == rows
    assert not copied_rows(key, (128, 128), cast(Any, batch), cast(Any, params), tokens, 1)
    beside = copied_rows(
        key, (128, 128), cast(Any, batch), cast(Any, params), tokens, 4, alone=False
    )
    assert beside == (0 if tokens < COPIED_TOKENS else rows)  # which runs while decodes do


@pytest.mark.parametrize(
    ("block_size", "tokens", "window", "rows"),
    [
        (1, OTHER_BLOCK_TOKENS, -1, 65_536),
        (24, OTHER_BLOCK_TOKENS, -1, 65_536),
        (1, OTHER_BLOCK_TOKENS - 1, -1, 0),
        (16, OTHER_BLOCK_TOKENS, -1, 0),
        (1, OTHER_BLOCK_TOKENS, 127, 0),
        (1, COPIED_TOKENS, 127, 65_536),
    ],
)
def test_float8_in_blocks_that_the_prefill_does_not_read(
    block_size: int, tokens: int, window: int, rows: int
) -> None:
    """Several requests and one query head per KV head, too: the portable kernel takes longer."""
    batch = SimpleNamespace(seq_lens=torch.zeros(2), max_seq_len=30_000)
    seen = {"window": (window, 0), "attention_chunk_size": 0}
    params = SimpleNamespace(scales_in_page=False, score_function=None, **seen)
    key = torch.empty(1, block_size, 8, 128, dtype=torch.float8_e4m3fn, device="meta")
    found = copied_rows(key, (128, 128), cast(Any, batch), cast(Any, params), tokens, 1)
    assert found == (rows if block_size != 16 else 0)


@pytest.mark.parametrize(("window", "chunk"), [((127, 0), 0), ((-1, 0), 8192)])
def test_chunks_that_see_a_part_of_the_keys_are_not_copied(
    window: tuple[int, int], chunk: int
) -> None:
    """Copies of one request have all of its keys, also those outside a window."""
    batch = SimpleNamespace(seq_lens=torch.zeros(1), max_seq_len=30_000)
    seen = {"window": window, "attention_chunk_size": chunk}
    params = SimpleNamespace(scales_in_page=False, score_function=None, **seen)
    key = torch.empty(1, 16, 8, 128, dtype=torch.float8_e4m3fn, device="meta")
    for tokens, rows in ((CHUNK_TOKENS, 0), (COPIED_TOKENS - 1, 0), (COPIED_TOKENS, 32_768)):
        assert copied_rows(key, (128, 128), cast(Any, batch), cast(Any, params), tokens, 4) == rows


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("most", [700, 2048, 4095, 16_384])
def test_warm_ups_run_every_kernel_of_chunks_over_copies(most: int, block_size: int) -> None:
    """P1: chunks of one request of fewer than COPIED_TOKENS have a kernel of their own."""

    def kernel(tokens: int) -> Any:
        found = _long_prefill(reqs=1, tokens=tokens, seq_len=32_768, n=block_size)
        return found.prefill.tile if isinstance(found, ConvertedPrefill) else None

    spec = AttentionSpec(
        num_heads=8, num_kv_heads=2, head_size=128, dtype=torch.bfloat16,
        kv_cache_dtype="fp8_e4m3", block_size=block_size,
    )  # fmt: skip
    limits = BatchLimits(max_num_reqs=64, max_num_tokens=most, max_seq_len=32_768)
    batches = [*warmup_batches(limits, 8), *long_batches(spec, limits)]
    assert max(map(sum, batches)) <= most
    warmed = {kernel(lengths[0]) for lengths in batches if len(lengths) == 1}
    edges = (CHUNK_TOKENS, 600, 2000, COPIED_TOKENS - 1, COPIED_TOKENS, 9000)
    possible = {kernel(tokens) for tokens in edges if tokens <= most}
    assert len(possible) == 1 + (most >= COPIED_TOKENS)
    assert possible <= warmed
