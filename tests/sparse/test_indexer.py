"""M14: the choice of keys by index keys, and the layer that attends to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.cache.index_keys import IndexKeyCache
from attnlib.errors import ContractError
from attnlib.ops.torch.key_indexer import select_keys
from attnlib.sparse.indexer import KeyIndexer
from attnlib.sparse.key_selection import KeySelection

TOKENS = KeySelection(max_blocks=4)
QUERY_LENS, SEQ_LENS = [1, 3], [10, 7]
TABLE = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32)


def _batch(selection: KeySelection = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(0)
    spec = attnlib.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=4,
        key_selection=selection,
    )  # fmt: skip
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths(QUERY_LENS, SEQ_LENS, TABLE, 4, "cpu")
    metadata = layer.backend.make_builder(spec, "cpu").build(0, common)
    cache = IndexKeyCache.allocate(6, 4, 16, dtype, "cpu")
    context = torch.randn(6, 4, 16)
    slots = torch.arange(24)
    cache.write(context.flatten(0, 1), slots)
    return layer, metadata, cache


def _keys(cache: IndexKeyCache, request: int) -> torch.Tensor:
    keys = cache.keys.float()
    if cache.scales is not None:
        keys = keys * cache.scales[..., None]
    return keys[TABLE[request].long()].flatten(0, 1)[: SEQ_LENS[request]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_the_best_visible_keys_are_selected(dtype: torch.dtype) -> None:
    """New index keys are written first; keys after the query are never selected."""
    _, metadata, cache = _batch(dtype=dtype)
    query, weights, new = torch.randn(4, 3, 16), torch.randn(4, 3), torch.randn(4, 16)
    selected = KeyIndexer(TOKENS)(query, weights, new, cache, metadata)
    assert selected.indices.shape == (4, 1, 4) and selected.list_start_loc is None
    row = 0
    for request, query_len in enumerate(QUERY_LENS):
        keys = _keys(cache, request)
        for i in range(query_len):
            position = SEQ_LENS[request] - query_len + i
            expected_error = 0.05 if cache.scales is not None else 1e-6
            assert (keys[position] - new[row]).abs().max() < expected_error * 4
            scores = ((query[row] @ keys.T).clamp(min=0) * weights[row][:, None]).sum(0)
            best = scores[: position + 1].sort(descending=True, stable=True).indices[:4]
            assert selected.indices[row, 0].tolist() == sorted(best.tolist())
            row += 1


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("with_weights", [True, False], ids=["one list", "list per head"])
def test_bfloat16_scores_are_float32_and_a_call_twice_gives_the_same_lists(
    stored: torch.dtype, with_weights: bool
) -> None:
    """M14: products are summed in float32; sums in bfloat16 choose other keys of 300."""
    torch.manual_seed(0)
    selection, heads, tokens, length = KeySelection(max_blocks=20), 3, 60, 300
    cache = IndexKeyCache.allocate(20, 16, 16, stored, "cpu")
    cache.write(torch.randn(320, 16).bfloat16(), torch.arange(320))
    query = torch.randn(tokens, heads, 16).bfloat16()
    weights = torch.rand(tokens, heads) if with_weights else None
    table = torch.randperm(20)[:19].int()[None]
    batch = (table, torch.tensor([0, tokens]).int(), torch.tensor([length]).int())
    found = []
    for fill in (7, -9):
        out = torch.full((tokens, 1 if with_weights else heads, 20), fill, dtype=torch.int32)
        select_keys(
            query, weights, cache.keys, cache.scales, *batch, selection, max_query_len=tokens,
            max_seq_len=length, out=out,
        )  # fmt: skip
        found.append(out)
    assert torch.equal(*found)
    keys = cache.keys.double()
    if cache.scales is not None:
        keys = keys * cache.scales[..., None]
    keys = keys[table[0].long()].flatten(0, 1)
    for token in range(tokens):
        scores = query[token].double() @ keys[: length - tokens + token + 1].T
        if weights is not None:
            scores = (scores.clamp(min=0) * weights[token][:, None]).sum(0, keepdim=True)
        best = scores.sort(descending=True, stable=True).indices[:, :20].sort().values
        assert torch.equal(found[0][token], best.int())


def test_ties_go_to_the_smallest_position_and_lists_are_padded() -> None:
    """Equal scores, -0 and NaN: NaN counts as -inf."""
    _, metadata, cache = _batch()
    cache.keys.zero_()
    zeros = torch.zeros(4, 2, 16)
    weights = torch.tensor([[1.0, -1.0]]).repeat(4, 1)
    selected = KeyIndexer(KeySelection(max_blocks=6))(zeros, weights, None, cache, metadata)
    assert selected.indices[:, 0].tolist() == [
        [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, -1], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5],
    ]  # fmt: skip
    cache.keys[3, 1] = torch.nan
    selected = KeyIndexer(KeySelection(max_blocks=6))(zeros + 1, weights, None, cache, metadata)
    assert selected.indices[0, 0].tolist() == [0, 2, 3, 4, 5, 6]


def test_blocks_have_the_score_of_their_best_key() -> None:
    """One list per index head; the blocks of the query are always selected."""
    blocks = KeySelection(max_blocks=2, block_size=2, scope="kv_head")
    layer, metadata, cache = _batch(blocks)
    query = torch.randn(4, 2, 16)
    selected = KeyIndexer(blocks, local_blocks=1)(query, None, None, cache, metadata)
    keys = _keys(cache, 0)
    for head in range(2):
        scores = query[0, head] @ keys.T
        best = int(scores[:8].view(-1, 2).amax(-1).argmax())
        assert selected.indices[0, head].tolist() == sorted([best, 4])  # position 9 is in block 4
    cache_of_layer = attnlib.PagedKVCache.allocate(layer.spec, 6, "cpu")
    cache_of_layer.key_cache.normal_()
    cache_of_layer.value_cache.normal_()
    out = layer(torch.randn(4, 4, 8), None, None, cache_of_layer, metadata, selected_keys=selected)
    assert out.shape == (4, 4, 8) and bool(out.isfinite().all())


def test_inputs_of_another_form_are_refused_before_anything_is_written() -> None:
    _, metadata, cache = _batch()
    indexer, before = KeyIndexer(TOKENS), cache.keys.clone()
    query, weights, key = torch.randn(4, 3, 16), torch.randn(4, 3), torch.randn(4, 16)
    for arguments, message in (
        ((torch.randn(4, 3, 8), weights, key), r"floating point .tokens, heads, 16."),
        ((query[:3], weights[:3], key), "3 rows, but the batch has 4 tokens"),
        ((query, weights.double(), key), "weights of the index heads are torch.float64"),
        ((query, weights, torch.randn(4, 8)), r"floating point .tokens, 16."),
        ((query, weights.to("meta"), key), "weights of the indexer is on meta"),
    ):
        with pytest.raises(ContractError, match=message):
            indexer(*arguments, cache, metadata)
    other = IndexKeyCache.allocate(6, 8, 16, torch.float32, "cpu")
    with pytest.raises(ContractError, match="blocks of 8 tokens, the batch has block_size=4"):
        indexer(query, weights, key, other, metadata)
    assert torch.equal(cache.keys, before)
    with pytest.raises(ContractError, match="query_block_size=4"):
        KeyIndexer(KeySelection(max_blocks=2, query_block_size=4))
    with pytest.raises(ContractError, match="local_blocks=5"):
        KeyIndexer(TOKENS, local_blocks=5)


def test_an_index_cache_checks_itself() -> None:
    keys = torch.zeros(2, 4, 8)
    with pytest.raises(ContractError, match="scales of an index cache are given"):
        IndexKeyCache(keys, torch.ones(2, 4))
    with pytest.raises(ContractError, match="scales of an index cache are missing"):
        IndexKeyCache(keys.to(torch.float8_e4m3fn))
    with pytest.raises(ContractError, match=r"must be torch.float32 \[2, 4\]"):
        IndexKeyCache(keys.to(torch.float8_e4m3fn), torch.ones(4, 2))
    with pytest.raises(ContractError, match="last stride 1"):
        IndexKeyCache(keys.transpose(1, 2))
    cache = IndexKeyCache(keys)
    cache.write(torch.ones(3, 8), torch.tensor([1, -1, 6]))
    assert cache.keys.sum() == 16 and cache.keys[0, 1].all() and cache.keys[1, 2].all()


def test_addresses_outside_of_the_index_cache_are_refused() -> None:
    """P3, P4: an index cache smaller than the table, slots past it, and no metadata at all."""
    _, metadata, cache = _batch()
    query, weights, new = torch.randn(4, 3, 16), torch.randn(4, 3), torch.randn(4, 16)
    small = IndexKeyCache(cache.keys[:5].clone())
    before = small.keys.clone()
    with pytest.raises(ContractError, match=r"block_table\[0\]\[2\]=5 is outside the pool of 5"):
        KeyIndexer(TOKENS)(query, weights, new, small, metadata)
    assert torch.equal(small.keys, before)
    with pytest.raises(ContractError, match="metadata of the indexer, a NoneType, has no block"):
        KeyIndexer(TOKENS)(query, weights, new, cache, None)
    with pytest.raises(ContractError, match="selection is a int"):
        KeyIndexer(4)  # type: ignore[arg-type]
    metadata.slot_mapping[1] = 24
    before = cache.keys.clone()
    with pytest.raises(ContractError, match=r"slot_mapping\[1\]=24 is outside the cache of 24"):
        KeyIndexer(TOKENS)(query, weights, new, cache, metadata)
    assert torch.equal(cache.keys, before)
