"""Caches of cross-attention: the layer writes the encoder's keys, then attends to them."""

import pytest
import torch

import attnlib
from attnlib.errors import ContractError

SPEC = attnlib.AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    dtype=torch.float32,
    block_size=16,
    attn_type=attnlib.AttentionType.ENCODER_DECODER,
)
TABLE = [[5, 1], [2], [7, 3]]


def _common(query_lens: list[int], new_key_lens: list[int] | None, **extra: object):
    return attnlib.CommonAttentionMetadata.from_lengths(
        query_lens, [20, 9, 32], TABLE, 16, "cpu",
        is_cross_attention=True, new_key_lens=new_key_lens, **extra,
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize("backend", ["torch", "triton", "prefill:torch,decode:triton"])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 12, 3]])
def test_the_layer_writes_the_keys_of_the_encoder(backend: str, query_lens: list[int]) -> None:
    """More keys than queries; the second request was written in an earlier step."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    layer = attnlib.Attention(SPEC, backend=backend, device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 8, "cpu")
    keys, values = (torch.randn(61, 2, 16) for _ in range(2))  # 20 + 9 + 32 encoder tokens
    builder = layer.backend.make_builder(SPEC, "cpu")
    for kept, new in (([20, 29], [0, 9, 0]), ([0, 20, 29, 61], [20, 0, 32])):
        rows = torch.cat([torch.arange(a, b) for a, b in zip(kept[::2], kept[1::2], strict=True)])
        query = torch.randn(sum(query_lens), 4, 16)
        step = builder.build(0, _common(query_lens, new))
        output = layer(query, keys[rows], values[rows], cache, step)
    position, expected = 0, []
    for request, (start, end) in enumerate(((0, 20), (20, 29), (29, 61))):
        q = query[position : position + query_lens[request]].transpose(0, 1)
        k, v = (x[start:end].repeat_interleave(2, 1).transpose(0, 1) for x in (keys, values))
        expected.append((torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v).transpose(0, 1))
        position += query_lens[request]
    torch.testing.assert_close(output, torch.cat(expected))
    again = layer(query, None, None, cache, builder.build(0, _common(query_lens, None)))
    assert torch.equal(again, output), "later steps read the cache"


def test_keys_without_slots_are_refused() -> None:
    layer = attnlib.Attention(SPEC, backend="torch", device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 8, "cpu")
    builder = layer.backend.make_builder(SPEC, "cpu")
    query, key = torch.randn(3, 4, 16), torch.randn(61, 2, 16)
    with pytest.raises(ContractError, match="no slot_mapping to write them to"):
        layer(query, key, key, cache, builder.build(0, _common([1, 1, 1], None)))
    with pytest.raises(ContractError, match="names 52 tokens, but key has 3 rows"):
        layer(query, key[:3], key[:3], cache, builder.build(0, _common([1, 1, 1], [20, 0, 32])))
    assert not cache.key_cache.any()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([20, 0], "2 new_key_lens for 3 requests"),
        ([21, 0, 0], r"new_key_lens\[0\]=21 must be from 0 to seq_lens\[0\]=20"),
        ([0, -1, 0], r"new_key_lens\[1\]=-1"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        _common([1, 1, 1], lengths)


def test_new_key_lens_are_for_cross_attention() -> None:
    with pytest.raises(ContractError, match="new_key_lens is for cross-attention"):
        attnlib.CommonAttentionMetadata.from_lengths([1], [4], [[0]], 16, "cpu", new_key_lens=[4])


def test_a_graph_does_not_write_the_keys_of_an_encoder() -> None:
    limits = attnlib.BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=64)
    layer = attnlib.Attention(SPEC, backend="torch", device="cpu")
    state = attnlib.AttentionState(layer.backend.make_builder(SPEC, "cpu", limits=limits), limits)
    with pytest.raises(ContractError, match="in a step without a graph"):
        state.begin_forward(_common([1, 1, 1], [20, 9, 32]), 4)
    state.begin_forward(_common([1, 1, 1], None), 4)
