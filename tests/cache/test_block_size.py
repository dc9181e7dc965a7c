"""Block sizes: negotiation, and the split of manager blocks into kernel blocks (K5)."""

from __future__ import annotations

import pytest
import torch

from attnlib.cache.block_size import BlockSplit, negotiate_block_size, split_blocks
from attnlib.cache.layout import LAYOUTS
from attnlib.cache.storage import PagedKVCache
from attnlib.capabilities import Sizes
from attnlib.errors import ContractError, LayoutMismatchError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill
from attnlib.spec import AttentionSpec


def test_the_largest_common_size_that_divides() -> None:
    assert negotiate_block_size([("a", Sizes(16, None, 16)), ("b", Sizes(1))], 256) == 256
    assert negotiate_block_size([("a", Sizes(exactly=(16, 32))), ("b", Sizes(1))], 64) == 32
    assert negotiate_block_size([("a", Sizes(16, None, 16)), ("b", Sizes(1, 48))], 96) == 48
    assert negotiate_block_size([], 7) == 7


def test_the_error_lists_all_demands_and_a_size_that_satisfies_them() -> None:
    """K5, vllm#48313: the message names a block size to use."""
    with pytest.raises(LayoutMismatchError) as error:
        negotiate_block_size(
            [
                ("layer 0 (flash_attn)", Sizes(256, None, 256)),
                ("layer 1 (mine)", Sizes(16, None, 48)),
            ],
            32,
        )
    text = str(error.value)
    assert (
        "blocks of 32 tokens" in text
        and "layer 0 (flash_attn) supports multiples of 256" in text
        and "layer 1 (mine) supports multiples of 48" in text
    )
    assert "use blocks of 768 tokens" in text
    with pytest.raises(LayoutMismatchError, match="no block size satisfies all"):
        negotiate_block_size([("a", Sizes(exactly=(16,))), ("b", Sizes(exactly=(24,)))], 48)
    with pytest.raises(LayoutMismatchError, match="use blocks of 16 tokens"):
        negotiate_block_size([("a", Sizes(exactly=(16,))), ("b", Sizes(1))], 24)
    with pytest.raises(ContractError, match="manager_block_size=0"):
        negotiate_block_size([], 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_split_cache_holds_the_same_tokens(layout: str, size: int) -> None:
    """P1, P3: element for element, in every layout, with undefined table entries."""
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=16
    )
    cache = PagedKVCache.allocate(spec, num_blocks=5, device="cpu", layout=layout)
    for view in (cache.key_cache, cache.value_cache):
        view.copy_(torch.randn(view.shape))
    table = torch.tensor([[3, 0, 2], [1, 4, 2**30]], dtype=torch.int32)
    split_cache, split = split_blocks(cache, size)
    expanded = split.expand(table)
    assert (
        expanded.shape == (2, 3 * 16 // size)
        and expanded.dtype == torch.int32
        and split_cache.block_size == size
    )
    for whole, part in (
        (cache.key_cache, split_cache.key_cache),
        (cache.value_cache, split_cache.value_cache),
    ):
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        for row, columns in ((0, 3), (1, 2)):
            blocks = expanded[row, : columns * 16 // size].long()
            assert torch.equal(
                part[blocks].reshape(-1, 2, 8), whole[table[row, :columns].long()].reshape(-1, 2, 8)
            )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_over_a_split_cache(layout: str) -> None:
    """The output is bitwise equal."""
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=32
    )
    cache = PagedKVCache.allocate(spec, num_blocks=6, device="cpu", layout=layout)
    for view in (cache.key_cache, cache.value_cache):
        view.copy_(torch.randn(view.shape))
    common = CommonAttentionMetadata.from_lengths([3, 1], [70, 33], [[5, 0, 3], [1, 4]], 32, "cpu")
    query, results = torch.randn(4, 4, 8), []
    split_cache, split = split_blocks(cache, 16)
    assert common.block_table_tensor is not None
    for pool, table in (
        (cache, common.block_table_tensor),
        (split_cache, split.expand(common.block_table_tensor)),
    ):
        out = torch.empty_like(query)
        lengths = (common.query_start_loc, common.seq_lens)
        paged_prefill(
            query,
            pool.key_cache,
            pool.value_cache,
            table,
            *lengths,
            AttentionParams(scale=0.3),
            max_query_len=3,
            max_seq_len=70,
            out=out,
        )
        results.append(out)
    assert torch.equal(*results)


def test_values_of_another_size_need_separate_views() -> None:
    spec = AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_size=24,
        head_size_v=16,
        dtype=torch.float32,
        block_size=16,
    )
    separate, split = split_blocks(PagedKVCache.allocate(spec, 3, "cpu", "NHD"), 8)
    assert split == BlockSplit(2, 2) and separate.head_size_v == 16
    with pytest.raises(LayoutMismatchError, match="allocate it as NHD"):
        split_blocks(PagedKVCache.allocate(spec, 3, "cpu", "NHD_INTERLEAVED"), 8)
    with pytest.raises(
        ContractError, match="kernel_block_size=5 does not divide the cache's block_size=16"
    ):
        split_blocks(
            separate if separate.block_size == 16 else PagedKVCache.allocate(spec, 3, "cpu"), 5
        )


def test_an_unsplit_cache_is_returned_and_expand_writes_to_out() -> None:
    spec = AttentionSpec(num_heads=2, head_size=8, dtype=torch.float32, block_size=16)
    cache = PagedKVCache.allocate(spec, 1, "cpu")
    assert split_blocks(cache, 16) == (cache, BlockSplit(1, 1))
    _, split = split_blocks(cache, 8)
    out = torch.zeros(1, 4, dtype=torch.int32)
    assert split.expand(
        torch.tensor([[0, 3]], dtype=torch.int32), out=out
    ) is out and out.tolist() == [[0, 1, 6, 7]]
