"""Slices of a batch: micro-batches give the rows of the whole batch."""

import pytest
import torch

import attnlib
from attnlib.errors import ContractError

SPEC = attnlib.AttentionSpec(
    num_heads=2, num_kv_heads=1, head_size=16, dtype=torch.float32, block_size=16
)
QUERY_LENS, SEQ_LENS = [1, 1, 12, 0, 7], [40, 17, 30, 5, 7]


def _common(**extra: object) -> attnlib.CommonAttentionMetadata:
    rows = [[4 * row + column for column in range(4)] for row in range(5)]
    return attnlib.CommonAttentionMetadata.from_lengths(
        QUERY_LENS, SEQ_LENS, rows, 16, "cpu", **extra
    )


def _cache() -> attnlib.PagedKVCache:
    torch.manual_seed(0)
    cache = attnlib.PagedKVCache.allocate(SPEC, 20, "cpu")
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    return cache


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize("cut", range(6))
@pytest.mark.parametrize("backend", ["torch", "triton", "prefill:torch,decode:triton"])
def test_two_slices_give_the_rows_of_the_batch(backend: str, cut: int) -> None:
    pytest.importorskip("triton")
    layer = attnlib.Attention(SPEC, backend=backend, device="cpu")
    builder = layer.backend.make_builder(SPEC, "cpu")
    common, whole, sliced = _common(), _cache(), _cache()
    q, k, v = (torch.randn(21, heads, 16) for heads in (2, 1, 1))
    expected = layer(q, k, v, whole, builder.build(0, common))
    results = []
    for first, end in ((0, cut), (cut, 5)):
        part = common.slice_requests(first, end)
        rows = slice(sum(QUERY_LENS[:first]), sum(QUERY_LENS[:end]))
        assert (part.num_reqs, part.num_actual_tokens) == (end - first, rows.stop - rows.start)
        step = builder.build(0, part)
        results.append(layer(q[rows], k[rows], v[rows], sliced, step))
    torch.testing.assert_close(torch.cat(results), expected)
    assert torch.equal(whole.key_cache, sliced.key_cache)


def test_a_slice_has_its_own_bounds_and_starts() -> None:
    common = _common(query_bias=torch.zeros(21, 12), causal=torch.tensor([True] * 4 + [False]))
    part = common.slice_requests(1, 3)
    assert part.query_start_loc.tolist() == [0, 1, 13] and part.query_start_loc.dtype == torch.int32
    assert part.query_lens_cpu.tolist() == [1, 12] and part.seq_lens.tolist() == [17, 30]
    assert (part.max_query_len, part.max_seq_len) == (12, 30)
    assert part.query_bias.shape == (13, 12) and part.causal.tolist() == [True, True]
    assert part.slot_mapping.data_ptr() == common.slot_mapping[1:].data_ptr()
    assert common.query_start_loc.tolist() == [0, 1, 2, 14, 14, 21]


def test_what_cannot_be_sliced() -> None:
    common = _common()
    for first, end in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(ContractError, match=r"are not a range of the 5 requests"):
            common.slice_requests(first, end)
    with pytest.raises(ContractError, match="query_start_loc_cpu is None"):
        common.replace(query_start_loc_cpu=None).slice_requests(0, 1)
    cross = attnlib.CommonAttentionMetadata.from_lengths(
        [1], [9], [[0]], 16, "cpu", is_cross_attention=True, new_key_lens=[9]
    )
    with pytest.raises(ContractError, match="cross-attention with slot_mapping"):
        cross.slice_requests(0, 1)
