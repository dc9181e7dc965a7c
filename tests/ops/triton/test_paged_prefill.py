"""Prefill over the paged cache: whole prompts, chunks over a context, and batches with decodes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.ops.triton.paged_decode import paged_decode
from attnlib.ops.triton.paged_prefill import paged_prefill
from tests.ops.triton.features import FEATURES, feature_options
from tests.ops.triton.paged_inputs import (
    BF16,
    DTYPES,
    LAYOUTS,
    PagedBatch,
    assert_close,
    make_batch,
)

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def _batch(device: torch.device, **options: Any) -> PagedBatch:
    """A prompt, a decode, a chunk, requests without keys or queries, and padding rows."""
    return make_batch(device, [35, 1, 7, 0, 2], [35, 50, 80, 40, 0], padding=3, **options)


def _options(batch: PagedBatch, name: str, device: torch.device) -> dict[str, Any]:
    return feature_options(
        name, requests=len(batch.seq_lens), tokens=batch.query.shape[0], heads=batch.query.shape[1],
        max_query_len=batch.options["max_query_len"], device=device,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_features(device: torch.device, feature: str) -> None:
    """M1 to M6, P3, P5: every feature in a mixed batch, over poisoned tensors."""
    batch = _batch(device)
    options = _options(batch, feature, device)
    batch.check(paged_prefill, batch.expected(**options), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature", [name for name in FEATURES if name not in ("plain", "causal_each", "all")]
)
def test_no_feature_is_ignored(device: torch.device, feature: str) -> None:
    """F1: every feature changes the output by far more than the tolerance."""
    batch = _batch(device)
    plain, _ = batch.run(paged_prefill)
    changed, _ = batch.run(paged_prefill, **_options(batch, feature, device))
    assert float((plain - changed).abs().max()) > 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "dv"), [(16, 16), (40, 40), (96, 96), (80, 48), (24, 64)])
def test_head_sizes_and_dtypes(device: torch.device, dtype: torch.dtype, d: int, dv: int) -> None:
    """Including sizes that are not powers of two, and values of another size than keys."""
    make_batch(device, [20, 1], [37, 50], heads=2, kv_heads=1, d=d, dv=dv, dtype=dtype).check(
        paged_prefill
    )


@pytest.mark.parametrize("d", [64, 72, 112, 120, 128, 192, 256, 512])
def test_large_head_sizes(device: torch.device, d: int) -> None:
    """Head sizes up to 512."""
    make_batch(device, [9], [41], heads=2, kv_heads=1, d=d, dtype=torch.float16).check(
        paged_prefill
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(3, 3), (5, 1), (12, 2), (14, 2), (8, 1), (24, 1), (130, 1)]
)
def test_group_sizes(device: torch.device, heads: int, kv_heads: int) -> None:
    """Any ratio of query to KV heads, including groups larger than a tile."""
    make_batch(device, [6, 1], [20, 19], heads=heads, kv_heads=kv_heads, d=16).check(paged_prefill)


@pytest.mark.parametrize("block_size", [8, 16, 24, 128, 544])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_block_sizes(device: torch.device, block_size: int, layout: str) -> None:
    """Multiples of 8, with invalid ids in the unused end of the table."""
    batch = make_batch(
        device,
        [2, 11],
        [block_size + 1, 90],
        block_size=block_size,
        layout=layout,
        heads=2,
        kv_heads=1,
        d=16,
    )
    batch.check(paged_prefill)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device: torch.device, layout: str) -> None:
    """P1, P2: the strides determine the memory order."""
    _batch(device, layout=layout, dv=16).check(paged_prefill)


@pytest.mark.parametrize("cache_dtype", FP8, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_head", [False, True], ids=["per_tensor", "per_head"])
def test_float8_cache(
    device: torch.device, cache_dtype: torch.dtype, dtype: torch.dtype, per_head: bool
) -> None:
    """M9, Q2: both formats, scales per tensor (a number, a tensor) and per head."""
    batch = make_batch(device, [13, 1], [40, 9], dtype=dtype, cache_dtype=cache_dtype)
    k_scale = torch.tensor([0.25, 0.8], device=device) if per_head else 0.25
    v_scale = (
        torch.tensor([0.5, 1.5], device=device) if per_head else torch.tensor(0.5, device=device)
    )
    batch.check(paged_prefill, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("window", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_are_exact(device: torch.device, window: int, causal: bool) -> None:
    """W2: equal scores and one-hot values give the uniform distribution over visible keys."""
    lengths = [40, 64]
    batch = make_batch(
        device, [40, 5], lengths, heads=1, kv_heads=1, d=64, block_size=16, causal=causal
    )
    batch.key_cache[batch.key_cache.isfinite()] = 0.0
    for request, length in enumerate(lengths):
        for position in range(length):
            block = int(batch.block_table[request, position // 16])
            batch.value_cache[block, position % 16, 0] = torch.nn.functional.one_hot(
                torch.tensor(position), 64
            ).float()
    out, _ = batch.run(paged_prefill, window=(window, -1 if causal else window))
    token = 0
    for query_len, length in ((40, 40), (5, 64)):
        for position in range(length - query_len, length):
            seen = set(out[token, 0].nonzero().flatten().tolist())
            last = position if causal else min(length - 1, position + window)
            assert seen == set(range(max(0, position - window), last + 1)), (position, length)
            token += 1


def test_window_reads_only_its_blocks(device: torch.device) -> None:
    """P5 of the field notes: blocks before the window, and their ids, are not read."""
    batch = make_batch(device, [4, 20], [100, 90], window=(9, -1))
    expected = batch.expected()
    batch.block_table[0, : (96 - 9) // 16] = 1 << 30
    batch.block_table[1, : (70 - 9) // 16] = -1
    batch.check(paged_prefill, expected)


def test_strided_query_and_out(device: torch.device) -> None:
    """P9, K4: q as a view of a fused projection and a strided out, twice in a row."""
    batch = _batch(device)
    expected = batch.expected()
    tokens, heads, d = batch.query.shape
    fused = torch.full((tokens, heads + 5, d), float("nan"), device=device)
    fused[:, 2 : heads + 2] = batch.query
    batch.query = fused[:, 2 : heads + 2]
    for _ in range(2):
        wide = torch.full((heads, tokens, d + 8), float("nan"), device=device)
        out = wide.transpose(0, 1)[..., 4 : d + 4]
        batch.run(paged_prefill, out=out)
        assert_close(out, expected[0], torch.float32)
        assert wide[..., :4].isnan().all() and wide[..., d + 4 :].isnan().all()


def test_more_queries_than_positions(device: torch.device) -> None:
    """M1: with a causal mask, queries before position 0 see nothing."""
    batch = make_batch(device, [5, 20], [3, 7])
    batch.check(paged_prefill)
    batch.check(paged_prefill, causal=False)
    batch.check(paged_prefill, causal=False, window=(-1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("requests", [1, 130])
def test_many_requests(device: torch.device, requests: int) -> None:
    """More requests than one load of the search, including requests without tokens."""
    generator = torch.Generator().manual_seed(0)
    query_lens = (torch.rand(requests, generator=generator) < 0.2).int().tolist()
    query_lens[0] = 3
    batch = make_batch(
        device,
        query_lens,
        [length + 2 for length in query_lens],
        heads=1,
        kv_heads=1,
        d=16,
        block_size=8,
        padding=1,
    )
    batch.check(paged_prefill)


@pytest.mark.parametrize("padding", [0, 1, 63, 64, 65, 200])
def test_every_padding_row_is_cleared(device: torch.device, padding: int) -> None:
    """M6: rows at or past the last request's end are exactly 0 and -inf."""
    batch = make_batch(device, [3, 31], [3, 40], heads=1, kv_heads=1, d=16, padding=padding)
    out, lse = batch.run(paged_prefill)
    assert torch.equal(out[34:], torch.zeros_like(out[34:]))
    assert bool((lse[34:] == -math.inf).all()) and not lse[:34].isinf().any()


def test_empty_batch(device: torch.device) -> None:
    """M7: nothing is launched without tokens; without requests all rows are cleared."""
    batch = make_batch(device, [0, 0], [5, 0])
    out, _ = batch.run(paged_prefill)
    assert out.shape[0] == 0
    padded = make_batch(device, [], [], padding=3)
    padded.block_table = torch.zeros(0, 8, dtype=torch.int32, device=device)[:, ::2]
    out, lse = padded.run(paged_prefill)
    assert torch.equal(out, torch.zeros_like(out)) and bool((lse == -math.inf).all())


def test_results_are_deterministic(device: torch.device) -> None:
    """M8, D2."""
    batch = _batch(device)
    assert torch.equal(batch.run(paged_prefill)[0], batch.run(paged_prefill)[0])


def test_unsupported_strides_and_heads_are_rejected(device: torch.device) -> None:
    """E: strided last dimensions and head counts that do not divide, before any launch."""
    batch = make_batch(device, [3], [5])
    with pytest.raises(
        ContractError, match=r"query has last stride 2; make its last dimension dense \[P1\]"
    ):
        PagedBatch(
            batch.query.repeat(1, 1, 2)[..., ::2], *batch.tensors()[1:], 3, batch.options
        ).run(paged_prefill)
    with pytest.raises(
        ContractError, match=r"lse has last stride 3; make its last dimension dense"
    ):
        batch.run(paged_prefill, lse=torch.empty(4, 3, device=device).T)
    with pytest.raises(ContractError, match=r"query has 3 heads and the keys have 2"):
        PagedBatch(batch.query[:, :3], *batch.tensors()[1:], 3, batch.options).run(paged_prefill)


def test_without_lse(device: torch.device) -> None:
    """The LSE is optional and does not change the output."""
    batch = _batch(device)
    with_lse, _ = batch.run(paged_prefill)
    without, _ = batch.run(paged_prefill, lse=None)
    assert torch.equal(with_lse, without)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [paged_prefill, paged_decode])
def test_pool_beyond_2_to_the_31_elements(device: torch.device, kernel: Any) -> None:
    """P6, O1: the last blocks of a large pool give the bits of a small pool."""
    small = make_batch(device, [3], [60], heads=4, kv_heads=1, d=128, dtype=torch.float16)
    blocks = (1 << 31) // (16 * 128) + 64
    shift = blocks - small.key_cache.shape[0]
    caches = []
    for cache in (small.key_cache, small.value_cache):
        pool = torch.empty(blocks, 16, 1, 128, dtype=torch.float16, device=device)
        pool[shift:] = cache
        caches.append(pool)
    table = torch.where(small.block_table < shift, small.block_table + shift, small.block_table)
    large = PagedBatch(
        small.query, *caches, table, small.query_start_loc, small.seq_lens, 3, small.options
    )
    assert torch.equal(large.run(kernel)[0], small.run(kernel)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("window", [-1, 200])
def test_long_chunk_over_a_context(device: torch.device, dtype: torch.dtype, window: int) -> None:
    """Real lengths against float32 attention over gathered keys."""
    batch = make_batch(
        device, [700, 1], [3000, 2000], heads=8, kv_heads=2, d=128, dtype=dtype, window=(window, -1)
    )
    out, lse = batch.run(paged_prefill)
    for span, request, length in ((slice(0, 700), 0, 3000), (slice(700, 701), 1, 2000)):
        blocks = batch.block_table[request, : -(-length // 16)].long()
        k = batch.key_cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(4, 1)
        v = batch.value_cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(4, 1)
        queries = batch.query[span].float()
        scores = torch.einsum("qhd,khd->hqk", queries, k) * batch.options["scale"]
        p = torch.arange(length - len(queries), length, device=device)[:, None]
        keys = torch.arange(length, device=device)[None]
        scores[:, (keys > p) | ((window >= 0) & (keys < p - window))] = -math.inf
        assert_close(lse[span], scores.logsumexp(2).T, dtype, "lse")
        assert_close(out[span], torch.einsum("hqk,khd->qhd", scores.softmax(2), v), dtype)
