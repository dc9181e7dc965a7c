"""The `PagedAttention` interface: packed layout, writes, decode, block-sparse decode, prefixes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from attnlib.errors import ContractError
from attnlib.ops.paged_attention import PagedAttention, PagedAttentionMetadata
from attnlib.ops.paged_attention_batch import packed_operation
from tests.ops.naive import naive_attention, naive_varlen_attention

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 6, 2, 32, 8, 24
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.06, 0.03, 0.015])
SEQ_LENS = (19, 1, 40)


def filled_cache(
    dtype: torch.dtype, kv_cache_dtype: str = "auto", scale: Any = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(kv_cache, table, keys, values): `SEQ_LENS` tokens written to a cache filled with NaN."""
    generator = torch.Generator().manual_seed(3)
    kv_cache = torch.empty(
        PagedAttention.get_kv_cache_shape(BLOCKS, BLOCK, KV_HEADS, SIZE), dtype=dtype
    )
    if dtype == torch.uint8:
        kv_cache.fill_(0x7F)
    else:
        kv_cache.fill_(math.nan)
    table = torch.randperm(BLOCKS, generator=generator)[:15].view(3, 5).int()
    total = sum(SEQ_LENS)
    keys, values = (torch.randn(total, KV_HEADS, SIZE, generator=generator) for _ in range(2))
    slots = [
        int(row[p // BLOCK]) * BLOCK + p % BLOCK
        for row, n in zip(table, SEQ_LENS, strict=True)
        for p in range(n)
    ]
    key_cache, value_cache = PagedAttention.split_kv_cache(kv_cache, KV_HEADS, SIZE)
    PagedAttention.write_to_paged_cache(
        keys, values, key_cache, value_cache, torch.tensor(slots), kv_cache_dtype, scale, scale
    )
    for request, seq_len in enumerate(SEQ_LENS):
        table[request, -(-seq_len // BLOCK) :] = 10**6
    return kv_cache, table, keys, values


def decode(
    query: Tensor,
    kv_cache: Tensor,
    table: Tensor,
    kv_cache_dtype: str = "auto",
    scale: Any = 1.0,
    **more: Any,
) -> Tensor:
    key_cache, value_cache = PagedAttention.split_kv_cache(kv_cache, KV_HEADS, SIZE)
    alibi = more.pop("alibi_slopes", None)
    lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    return PagedAttention.forward_decode(
        query,
        key_cache,
        value_cache,
        table,
        lens,
        max(SEQ_LENS),
        kv_cache_dtype,
        KV_HEADS,
        0.2,
        alibi,
        scale,
        scale,
        **more,
    )


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_shapes_and_views() -> None:
    """The allocation is flat; keys are packed in units of 16 bytes; both sides are views."""
    assert PagedAttention.get_kv_cache_shape(24, 8, 2, 32) == (2, 24, 512)
    assert 128 in PagedAttention.get_supported_head_sizes()
    for dtype, x in ((torch.float32, 4), (torch.bfloat16, 8), (torch.uint8, 16)):
        kv_cache = torch.zeros(2, 24, 512, dtype=dtype)
        key_cache, value_cache = PagedAttention.split_kv_cache(kv_cache, 2, 32)
        assert key_cache.shape == (24, 2, 32 // x, 8, x) and value_cache.shape == (24, 2, 32, 8)
        key_cache[5, 1, 1, 3, 2] = 1
        assert kv_cache[0, 5].view(2, 32 // x, 8, x)[1, 1, 3, 2] == 1
    metadata = PagedAttentionMetadata(seq_lens_tensor=None, max_decode_seq_len=0, block_tables=None)
    assert metadata.max_decode_seq_len == 0


def test_head_size_that_does_not_pack() -> None:
    with pytest.raises(ContractError, match="head_size 24 is not a multiple of x = 16"):
        PagedAttention.split_kv_cache(torch.zeros(2, 4, 8 * 2 * 24, dtype=torch.uint8), 2, 24)


def test_write_places_every_element() -> None:
    """P4: element d of a key is stored at [d // x, offset, d % x]; -1 writes nothing."""
    kv_cache = torch.zeros(2, 4, BLOCK * KV_HEADS * SIZE)
    key_cache, value_cache = PagedAttention.split_kv_cache(kv_cache, KV_HEADS, SIZE)
    key, value = torch.randn(3, KV_HEADS, SIZE), torch.randn(3, KV_HEADS, SIZE)
    PagedAttention.write_to_paged_cache(
        key, value, key_cache, value_cache, torch.tensor([[11], [-1], [30]]), "auto", 1.0, 1.0
    )
    for token, (block, offset) in ((0, (1, 3)), (2, (3, 6))):
        for element in range(SIZE):
            assert torch.equal(
                key_cache[block, :, element // 4, offset, element % 4], key[token, :, element]
            )
            assert torch.equal(value_cache[block, :, element, offset], value[token, :, element])
    assert int((kv_cache != 0).sum()) == 2 * 2 * KV_HEADS * SIZE


@pytest.mark.parametrize("alibi", [None, SLOPES])
def test_decode(alibi: Tensor | None) -> None:
    """Attention over the written tokens; nothing else is read (P3, P5)."""
    kv_cache, table, keys, values = filled_cache(torch.float32)
    query = torch.randn(3, HEADS, SIZE)
    wanted, _ = naive_varlen_attention(
        query, keys, values, starts(1, 1, 1), starts(*SEQ_LENS), scale=0.2, alibi_slopes=alibi
    )
    out = decode(query, kv_cache, table, alibi_slopes=alibi)
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(
    "scale", [0.5, torch.tensor(0.5), torch.tensor([0.5, 0.25])], ids=["float", "0-d", "per_head"]
)
def test_fp8_bytes(name: str, scale: Any) -> None:
    """M9: a uint8 cache is read in the named format, with its scales."""
    fp8 = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    kv_cache, table, keys, values = filled_cache(torch.uint8, name, scale)
    factor = scale.view(-1, 1) if isinstance(scale, Tensor) else scale
    keys, values = ((side / factor).to(fp8).float() * factor for side in (keys, values))
    query = torch.randn(3, HEADS, SIZE)
    wanted, _ = naive_varlen_attention(
        query, keys, values, starts(1, 1, 1), starts(*SEQ_LENS), scale=0.2
    )
    torch.testing.assert_close(
        decode(query, kv_cache, table, name, scale).double(), wanted, atol=2e-5, rtol=2e-5
    )
    with pytest.raises(ContractError, match="'auto' is not a float8 format"):
        decode(query, kv_cache, table, "auto", scale)


def test_scales_of_a_plain_cache_are_not_applied() -> None:
    kv_cache, table, _, _ = filled_cache(torch.float32)
    query = torch.randn(3, HEADS, SIZE)
    assert torch.equal(decode(query, kv_cache, table, scale=2.0), decode(query, kv_cache, table))


@pytest.mark.parametrize("step", [0, 1, 3, -1, -2])
@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize(("local", "stride"), [(1, 2), (2, 3), (0, 4)])
@pytest.mark.parametrize("alibi", [None, SLOPES])
def test_block_sparse_decode(
    step: int, tp_rank: int, local: int, stride: int, alibi: Tensor | None
) -> None:
    """Local blocks and sliding stripes, per query head or per KV head, checked key by key."""
    kv_cache, table, keys, values = filled_cache(torch.float32)
    query = torch.randn(3, HEADS, SIZE)
    out = decode(
        query, kv_cache, table, alibi_slopes=alibi, tp_rank=tp_rank, blocksparse_local_blocks=local,
        blocksparse_vert_stride=stride, blocksparse_block_size=BLOCK,
        blocksparse_head_sliding_step=step,
    )  # fmt: skip
    ends = starts(*SEQ_LENS).tolist()
    for request, seq_len in enumerate(SEQ_LENS):
        for head in range(HEADS):
            kv_head = head // 3
            offset = (
                step * (tp_rank * HEADS + head) + 1
                if step >= 0
                else -step * (tp_rank * KV_HEADS + kv_head) + 1
            )
            last = (seq_len - 1) // BLOCK
            seen = [
                k
                for k in range(seq_len)
                if k // BLOCK > last - local or (k // BLOCK + offset) % stride == 0
            ]
            if not seen:
                assert torch.equal(out[request, head], torch.zeros(SIZE))
                continue
            rows = torch.tensor(seen) + ends[request]
            logits = keys[rows, kv_head].double() @ query[request, head].double() * 0.2
            if alibi is not None:
                logits -= alibi[head].double() * (seq_len - 1 - torch.tensor(seen))
            wanted = torch.softmax(logits, 0) @ values[rows, kv_head].double()
            torch.testing.assert_close(out[request, head].double(), wanted, atol=2e-5, rtol=2e-5)


def test_block_sparse_needs_whole_blocks() -> None:
    kv_cache, table, _, _ = filled_cache(torch.float32)
    with pytest.raises(
        ContractError, match="blocksparse_block_size 12 is not a positive multiple.*8"
    ):
        decode(
            torch.randn(3, HEADS, SIZE),
            kv_cache,
            table,
            blocksparse_vert_stride=2,
            blocksparse_block_size=12,
        )


def test_block_sparse_of_an_empty_sequence() -> None:
    """M7: seq_len 0 yields 0."""
    kv_cache, table, _, _ = filled_cache(torch.float32)
    key_cache, value_cache = PagedAttention.split_kv_cache(kv_cache, KV_HEADS, SIZE)
    for stride in (0, 2):
        out = PagedAttention.forward_decode(
            torch.randn(1, HEADS, SIZE), key_cache, value_cache, table[:1], torch.zeros(1,
            dtype=torch.int32), 0, "auto", KV_HEADS, 0.2, None, 1.0, 1.0,
            blocksparse_vert_stride=stride, blocksparse_block_size=BLOCK,
        )  # fmt: skip
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("window", [None, 0, 1, 5, 100])
@pytest.mark.parametrize("alibi", [None, SLOPES])
def test_prefix(window: int | None, alibi: Tensor | None) -> None:
    """M1, M2: new tokens see the context and each other; their keys come from the arguments."""
    kv_cache, table, keys, values = filled_cache(torch.float32)
    query_lens, new = (3, 1, 12), []
    ends = starts(*SEQ_LENS).tolist()
    for request, length in enumerate(query_lens):
        new += list(range(ends[request + 1] - length, ends[request + 1]))
    query = torch.randn(sum(query_lens) + 2, HEADS, SIZE)
    fresh_keys, fresh_values = keys.clone(), values.clone()
    fresh_keys[new], fresh_values[new] = (
        torch.randn(len(new), KV_HEADS, SIZE),
        torch.randn(len(new), KV_HEADS, SIZE),
    )
    key_cache, value_cache = PagedAttention.split_kv_cache(kv_cache, KV_HEADS, SIZE)
    lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    out = PagedAttention.forward_prefix(
        query, fresh_keys[new], fresh_values[new], "auto", key_cache, value_cache, table,
        starts(*query_lens), lens, 12, alibi, window, 1.0, 1.0,
    )  # fmt: skip
    wanted, _ = naive_varlen_attention(
        query, fresh_keys, fresh_values, starts(*query_lens), starts(*SEQ_LENS), scale=SIZE**-0.5,
        causal=True, window=(window - 1, -1) if window else (-1, -1), alibi_slopes=alibi,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)


def test_prefix_over_fp8_context() -> None:
    """M9: the context is dequantized with its scale, the new tokens are not scaled."""
    kv_cache, table, keys, values = filled_cache(torch.uint8, "fp8", 0.5)
    context = [
        position for position in range(sum(SEQ_LENS)) if position + 1 not in starts(*SEQ_LENS)
    ]
    for side in (keys, values):
        side[context] = (side[context] / 0.5).to(torch.float8_e4m3fn).float() * 0.5
    last = (starts(*SEQ_LENS)[1:] - 1).long()
    key_cache, value_cache = PagedAttention.split_kv_cache(kv_cache, KV_HEADS, SIZE)
    query = torch.randn(3, HEADS, SIZE)
    out = PagedAttention.forward_prefix(
        query, keys[last], values[last], "fp8", key_cache, value_cache, table, starts(1, 1, 1),
        torch.tensor(SEQ_LENS, dtype=torch.int32), 1, None, None, 0.5, 0.5,
    )  # fmt: skip
    wanted, _ = naive_varlen_attention(
        query, keys, values, starts(1, 1, 1), starts(*SEQ_LENS), scale=SIZE**-0.5
    )
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_swap_and_copy_blocks(dtype: torch.dtype) -> None:
    """Blocks move whole, keys and values alike, and no other block changes."""
    source = torch.randn(2, 6, 32).to(dtype)
    target = torch.zeros(2, 4, 32).to(dtype)
    PagedAttention.swap_blocks(source, target, torch.tensor([[5, 0], [2, 3]]))
    wanted = torch.zeros(2, 4, 32)
    wanted[:, 0], wanted[:, 3] = source[:, 5].float(), source[:, 2].float()
    assert torch.equal(target.float(), wanted)

    layers = [torch.randn(2, 6, 32).to(dtype) for _ in range(2)]
    before = [layer.float().clone() for layer in layers]
    PagedAttention.copy_blocks(layers, torch.tensor([[0, 4], [4, 1]]))
    for layer, old in zip(layers, before, strict=True):
        old[:, [4, 1]] = old[:, [0, 4]]
        assert torch.equal(layer.float(), old)


def test_blocks_of_pairs_of_keys_and_values() -> None:
    """Caches that are two tensors, as `split_kv_cache` returns them; of mixed forms, too."""
    shape = PagedAttention.get_kv_cache_shape(6, BLOCK, KV_HEADS, SIZE)
    source, target = torch.randn(shape), torch.zeros(shape)
    pair = PagedAttention.split_kv_cache(source, KV_HEADS, SIZE)
    PagedAttention.swap_blocks(
        pair, PagedAttention.split_kv_cache(target, KV_HEADS, SIZE), torch.tensor([[5, 0]])
    )
    assert torch.equal(target[:, 0], source[:, 5]) and not target[:, 1:].any()
    PagedAttention.swap_blocks(list(source), target, torch.tensor([[1, 2]]))
    assert torch.equal(target[:, 2], source[:, 1])
    before = source.clone()
    PagedAttention.copy_blocks([pair, target], torch.tensor([[0, 4], [4, 1]]))
    before[:, [4, 1]] = before[:, [0, 4]]
    assert torch.equal(source, before) and torch.equal(target[:, 4], target[:, 0])
    for wrong in (source[0], (source[0],), "kv"):
        with pytest.raises(ContractError, match="pass a tensor"):
            PagedAttention.copy_blocks([target, wrong], torch.tensor([[4, 3]]))
    assert not target[:, 3].any()


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([[6, 0]], "source block 6"),
        ([[-1, 0]], "source block -1"),
        ([[0, 4]], "destination block 4"),
        ([[0, -1]], "destination block -1"),
        ([[0, 1], [2, 1]], "destination block 1 occurs more than once"),
        ([[0.5, 1.0]], "pass integers"),
        ([[0, 1, 2]], "of shape"),
    ],
)
def test_invalid_blocks_are_refused(pairs: list[list[float]], words: str) -> None:
    """Ids outside either cache, repeated targets and other types; nothing is written."""
    source, target = torch.randn(2, 6, 32), torch.zeros(2, 4, 32)
    with pytest.raises(ContractError, match=words):
        PagedAttention.swap_blocks(source, target, torch.tensor(pairs))
    assert not target.any()
    before = target.clone()
    with pytest.raises(ContractError, match=words):
        PagedAttention.copy_blocks([target], torch.tensor(pairs))
    assert torch.equal(target, before)


def test_slots_of_a_write_are_integers() -> None:
    """P4: a fraction is not the slot before it."""
    key_cache, value_cache = torch.zeros(3, 2, 4, 4, 4), torch.zeros(3, 2, 16, 4)
    rows = torch.ones(2, 2, 16)
    arguments = (rows, rows, key_cache, value_cache)
    with pytest.raises(ContractError, match=r"slot_mapping is torch.float32.*\[P4\]"):
        PagedAttention.write_to_paged_cache(*arguments, torch.tensor([1.5, 2.0]), "auto", 1.0, 1.0)
    assert not key_cache.any() and not value_cache.any()
    PagedAttention.write_to_paged_cache(
        *arguments, torch.tensor([[1, 6]], dtype=torch.int32), "auto", 1.0, 1.0
    )
    assert value_cache.nonzero()[:, [0, 3]].unique(dim=0).tolist() == [[0, 1], [1, 2]]


def test_caches_of_different_dtypes_are_not_swapped() -> None:
    """Blocks are copied as stored."""
    with pytest.raises(ContractError, match="blocks of one kind"):
        PagedAttention.swap_blocks(
            torch.zeros(2, 6, 32), torch.zeros(2, 4, 32).half(), torch.tensor([[0, 1]])
        )


def test_naive_reference_agrees_with_torch() -> None:
    """The reference itself: paged, causal, grouped heads, natural-log LSE."""
    key_cache, value_cache, query = (
        torch.randn(9, 4, 2, 8),
        torch.randn(9, 4, 2, 8),
        torch.randn(5, 4, 8),
    )
    table = torch.tensor([[3, 8, 1, 6]], dtype=torch.int32)
    out, lse = naive_attention(
        query, key_cache, value_cache, table, starts(5), torch.tensor([14]), scale=0.3
    )
    key, value = (
        cache[table[0].long()].flatten(0, 1)[:14].transpose(0, 1).double()
        for cache in (key_cache, value_cache)
    )
    mask = torch.ones(5, 14, dtype=torch.bool).tril(9)
    rows = query.double().transpose(0, 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        rows, key, value, mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, wanted.transpose(0, 1), atol=1e-12, rtol=1e-12)
    scores = (rows @ key.repeat_interleave(2, 0).transpose(1, 2) * 0.3).masked_fill(
        ~mask, -math.inf
    )
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1).t(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("block_size", [1, 3, 12, 16, 24])
def test_torch_serves_blocks_that_are_no_power_of_two(block_size: int) -> None:
    """On every device: a tensor of a GPU goes to the kernels for the other sizes only."""
    with FakeTensorMode():
        rows = torch.empty(1, HEADS, SIZE, device="cuda")
        cache = torch.empty(2, KV_HEADS, SIZE, block_size, device="cuda")
    chosen = packed_operation("packed_decode", rows, cache).__module__
    package = "triton" if block_size in (1, 16) else "torch"
    assert chosen.startswith(f"attnlib.ops.{package}.")


def test_addresses_outside_of_the_cache_are_refused() -> None:
    """P3, P4: on a CPU before anything is written."""
    shape = PagedAttention.get_kv_cache_shape(2, BLOCK, KV_HEADS, SIZE)
    cache = torch.zeros(shape)
    views = PagedAttention.split_kv_cache(cache, KV_HEADS, SIZE)
    key = torch.ones(1, KV_HEADS, SIZE)
    with pytest.raises(ContractError, match=r"slot_mapping\[0\]=16 is outside the cache of 16"):
        PagedAttention.write_to_paged_cache(key, key, *views, torch.tensor([16]), "auto", 1.0, 1.0)
    table, lens = torch.tensor([[0, 2]]), torch.tensor([9])
    query = torch.zeros(1, HEADS, SIZE)
    with pytest.raises(ContractError, match=r"block_table\[0\]\[1\]=2 is outside the pool of 2"):
        PagedAttention.forward_decode(
            query, *views, table, lens, 9, "auto", KV_HEADS, 1.0, None, 1.0, 1.0
        )
    with pytest.raises(ContractError, match="query_start_loc ends at 2, past the 1 rows"):
        PagedAttention.forward_prefix(
            query, key, key, "auto", *views, torch.tensor([[0, 1]]), torch.tensor([0, 2]), lens, 2,
            None, None, 1.0, 1.0,
        )  # fmt: skip
    other = torch.ones(2, 1, *shape[2:])
    with pytest.raises(ContractError, match="block 1 .* is outside the pool of 1"):
        PagedAttention.copy_blocks([cache, other], torch.tensor([[0, 1]]))
    assert not cache.any()
