"""Split-KV decode over the paged cache."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.ops.triton.paged_decode import (
    paged_decode,
    paged_decode_num_splits,
    paged_decode_workspace_bytes,
)
from tests.ops.triton.features import FEATURES, feature_options
from tests.ops.triton.paged_inputs import (
    BF16,
    DTYPES,
    LAYOUTS,
    PagedBatch,
    assert_close,
    make_batch,
)

SPLITS = [None, 1, 2, 3, 8]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def _batch(device: torch.device, **options: Any) -> PagedBatch:
    """Lengths around tile and block borders, requests without keys or queries, padding rows."""
    return make_batch(device, [1, 2, 0, 1, 4, 1], [1, 33, 40, 0, 64, 97], padding=2, **options)


def _options(batch: PagedBatch, name: str, device: torch.device) -> dict[str, Any]:
    return feature_options(
        name, requests=len(batch.seq_lens), tokens=batch.query.shape[0], heads=batch.query.shape[1],
        max_query_len=batch.options["max_query_len"], device=device,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_features(device: torch.device, feature: str) -> None:
    """M1 to M5, P3, P5, N2: every feature, over poisoned tensors, with and without splits."""
    batch = _batch(device)
    options = _options(batch, feature, device)
    expected = batch.expected(**options)
    for num_splits in (None, 1, 3):
        batch.check(partial(paged_decode, num_splits=num_splits), expected, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature", [name for name in FEATURES if name not in ("plain", "causal_each", "all")]
)
def test_no_feature_is_ignored(device: torch.device, feature: str) -> None:
    """F1: every feature changes the output by far more than the tolerance."""
    batch = _batch(device)
    plain, _ = batch.run(paged_decode)
    changed, _ = batch.run(paged_decode, **_options(batch, feature, device))
    assert float((plain - changed).abs().max()) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("feature", ["sinks", "window_both"])
def test_number_of_splits_does_not_change_results(
    device: torch.device, num_splits: int | None, feature: str
) -> None:
    """L3, M4: including splits without work; the sink counts once."""
    batch = make_batch(device, [1, 1, 3], [150, 7, 70], block_size=8)
    options = _options(batch, feature, device)
    batch.check(partial(paged_decode, num_splits=num_splits), batch.expected(**options), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "dv"), [(16, 16), (40, 40), (96, 96), (80, 48), (24, 64)])
def test_head_sizes_and_dtypes(device: torch.device, dtype: torch.dtype, d: int, dv: int) -> None:
    """Including sizes that are not powers of two, and values of another size than keys."""
    batch = make_batch(device, [1, 2], [37, 50], d=d, dv=dv, dtype=dtype)
    batch.check(partial(paged_decode, num_splits=2))


@pytest.mark.parametrize("d", [64, 72, 112, 120, 128, 192, 256, 512])
def test_large_head_sizes(device: torch.device, d: int) -> None:
    """Head sizes up to 512."""
    make_batch(device, [1], [41], heads=2, kv_heads=1, d=d, dtype=torch.float16).check(paged_decode)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(3, 3), (5, 1), (12, 2), (14, 2), (8, 1), (24, 1), (20, 1)]
)
@pytest.mark.parametrize("query_len", [1, 3])
def test_group_sizes(device: torch.device, heads: int, kv_heads: int, query_len: int) -> None:
    """P6 of the field notes: any ratio of query to KV heads, with 1 and 4 query tokens."""
    make_batch(device, [query_len, 1], [30, 19], heads=heads, kv_heads=kv_heads, d=16).check(
        paged_decode
    )


@pytest.mark.parametrize("block_size", [8, 16, 24, 128, 544])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_block_sizes(device: torch.device, block_size: int, layout: str) -> None:
    """Multiples of 8, with invalid ids in the unused end of the table."""
    batch = make_batch(
        device,
        [1, 1, 2],
        [block_size - 1, block_size + 1, 3 * 8],
        block_size=block_size,
        layout=layout,
        heads=2,
        kv_heads=1,
        d=16,
    )
    batch.check(partial(paged_decode, num_splits=2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e4m3fn], ids=["f16", "e4m3"])
def test_layouts(device: torch.device, layout: str, cache_dtype: torch.dtype) -> None:
    """P1, P2: the strides determine the memory order."""
    _batch(device, layout=layout, dv=16, dtype=torch.float16, cache_dtype=cache_dtype).check(
        paged_decode
    )


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", FP8, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_head", [False, True], ids=["per_tensor", "per_head"])
def test_float8_cache(
    device: torch.device, cache_dtype: torch.dtype, dtype: torch.dtype, per_head: bool
) -> None:
    """M9, Q2: both formats, scales per tensor (a number, a tensor) and per head."""
    batch = _batch(device, dtype=dtype, cache_dtype=cache_dtype)
    k_scale = torch.tensor([0.25, 0.8], device=device) if per_head else 0.25
    v_scale = (
        torch.tensor([0.5, 1.5], device=device) if per_head else torch.tensor(0.5, device=device)
    )
    batch.check(paged_decode, k_scale=k_scale, v_scale=v_scale)
    scaled, _ = batch.run(paged_decode, k_scale=k_scale, v_scale=v_scale)
    unscaled, _ = batch.run(paged_decode)
    assert float((scaled - unscaled).float().abs().max()) > 0.1


def test_values_alias_keys(device: torch.device) -> None:
    """P1: values may be a slice of the keys."""
    batch = make_batch(device, [1, 1], [20, 50], d=32, dv=16)
    batch.value_cache = batch.key_cache[..., :16]
    batch.check(paged_decode)


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
        batch.run(paged_decode, out=out)
        assert_close(out, expected[0], torch.float32)
        assert wide[..., :4].isnan().all() and wide[..., d + 4 :].isnan().all()


def test_rows_with_windows_in_different_tiles(device: torch.device) -> None:
    """N4: rows of one tile whose windows begin in different tiles; -inf - -inf makes no NaN."""
    batch = make_batch(device, [8], [120], heads=2, kv_heads=1, d=16, window=(3, -1))
    batch.check(paged_decode)
    batch.check(partial(paged_decode, num_splits=4))


def test_more_queries_than_positions(device: torch.device) -> None:
    """M1: with a causal mask, queries before position 0 see nothing."""
    batch = make_batch(device, [5, 2], [3, 0])
    batch.check(paged_decode)
    batch.check(paged_decode, causal=False)
    batch.check(paged_decode, causal=False, attention_chunk_size=2)


def test_bias_that_hides_all_keys(device: torch.device) -> None:
    """M5: a row without a visible key gives 0 and -inf."""
    batch = make_batch(device, [2, 1], [2, 40])
    bias = torch.full((3, 2), -math.inf, device=device)
    batch.check(paged_decode, query_bias=bias)
    out, lse = batch.run(paged_decode, query_bias=bias)
    assert torch.equal(out[:2], torch.zeros_like(out[:2])) and bool((lse[:2] == -math.inf).all())


def test_empty_batch(device: torch.device) -> None:
    """M7: nothing is launched without tokens; without requests all rows are cleared."""
    batch = make_batch(device, [0, 0], [5, 0])
    out, lse = batch.run(paged_decode)
    assert out.shape[0] == 0 and lse.shape[0] == 0
    padded = make_batch(device, [], [], padding=3)
    out, lse = padded.run(paged_decode)
    assert torch.equal(out, torch.zeros_like(out)) and bool((lse == -math.inf).all())


def test_fixed_splits_are_batch_invariant(device: torch.device) -> None:
    """M8, D1: with num_splits, the bits of a row depend on its own request only."""
    many = make_batch(device, [1, 1, 1], [150, 90, 33], seed=3)
    out, _ = many.run(paged_decode, num_splits=3)
    alone = PagedBatch(
        many.query[1:2],
        many.key_cache,
        many.value_cache,
        many.block_table[1:2].contiguous(),
        many.query_start_loc[:2],
        many.seq_lens[1:2],
        1,
        many.options,
    )
    assert torch.equal(alone.run(paged_decode, num_splits=3)[0], out[1:2])


def test_results_are_deterministic(device: torch.device) -> None:
    """M8, D2."""
    batch = make_batch(device, [1, 2], [200, 60])
    assert torch.equal(batch.run(paged_decode)[0], batch.run(paged_decode)[0])


def test_workspace_is_used_and_its_size_is_checked(device: torch.device) -> None:
    """P3 of the field notes: the declared bytes suffice with any content; fewer are rejected."""
    batch = make_batch(device, [1, 1], [200, 60])
    need = paged_decode_workspace_bytes(2, 4, 32, 4)
    assert need == 4 * (2 * 4 * 4 * 33 + 2)
    guard = torch.full((need // 4 + 1,), float("nan"), device=device)
    batch.check(partial(paged_decode, num_splits=4, workspace=guard[:-1]))
    assert guard[-1].isnan() and not guard[:-1].isnan().all()
    batch.check(
        partial(
            paged_decode,
            num_splits=4,
            workspace=torch.full((need,), 255, dtype=torch.uint8, device=device),
        )
    )
    with pytest.raises(
        ContractError, match=rf"workspace holds {need - 4} bytes and this call needs {need}"
    ):
        batch.run(paged_decode, num_splits=4, workspace=guard[:-2])
    assert paged_decode_workspace_bytes(2, 4, 32, 1) == 0


def test_counters_of_another_dtype_are_rejected(device: torch.device) -> None:
    """Before any launch, because a launch would change them."""
    batch = make_batch(device, [1], [20])
    with pytest.raises(
        ContractError, match=r"counters are torch.float32 and must be torch.int32 zeros"
    ):
        batch.run(paged_decode, counters=torch.zeros(200, device=device))
    batch.check(partial(paged_decode, counters=torch.zeros(200, dtype=torch.int32, device=device)))


def test_workspace_of_the_default_number_of_splits(device: torch.device) -> None:
    """P3 of the field notes: `paged_decode_num_splits` sizes the workspace of a default call."""
    batch = make_batch(device, [1, 1], [200, 60])
    bound = paged_decode_num_splits(
        batch.query,
        batch.key_cache,
        32,
        num_reqs=2,
        max_query_len=1,
        max_seq_len=batch.options["max_seq_len"],
    )
    assert bound > 1
    need = paged_decode_workspace_bytes(2, 4, 32, bound)
    batch.check(
        partial(paged_decode, workspace=torch.empty(need, dtype=torch.uint8, device=device))
    )


def test_too_many_requests_are_rejected(device: torch.device) -> None:
    """E: before any launch; the error names the limit of the grid."""
    batch = make_batch(device, [1], [5])
    starts = torch.zeros(65536, dtype=torch.int32, device=device)
    batch = PagedBatch(*batch.tensors()[:4], starts, starts[1:], 1, batch.options)
    with pytest.raises(ContractError, match=r"65535 requests exceeds the limit of 65534; split it"):
        batch.run(paged_decode)


def test_unsupported_query_dtype_is_rejected(device: torch.device) -> None:
    """E: before any launch."""
    batch = make_batch(device, [1], [5])
    batch.query = batch.query.double()
    with pytest.raises(
        ContractError, match=r"query has dtype torch.float64; the kernels take float16, bfloat16"
    ):
        batch.run(paged_decode)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_long_ragged_batch(device: torch.device, dtype: torch.dtype) -> None:
    """Real lengths against float32 attention over gathered keys, with several splits."""
    lens = [4000, 17, 9000, 512, 1]
    batch = make_batch(device, [1] * 5, lens, heads=32, kv_heads=8, d=128, dtype=dtype)
    out, lse = batch.run(paged_decode)
    for request, length in enumerate(lens):
        blocks = batch.block_table[request, : -(-length // 16)].long()
        k = batch.key_cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(4, 1)
        v = batch.value_cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(4, 1)
        scores = (
            torch.einsum("hd,khd->hk", batch.query[request].float(), k) * batch.options["scale"]
        )
        assert_close(lse[request], scores.logsumexp(1), dtype, "lse")
        assert_close(out[request], torch.einsum("hk,khd->hd", scores.softmax(1), v), dtype)
