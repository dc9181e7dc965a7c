"""Packed latents (656 bytes per token): the Triton kernels against torch, and torch against bytes
made by hand."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from attnlib.cache.packed_latents import PackedLatentCache
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch import packed_latents as torch_ops
from attnlib.ops.triton import packed_latents as triton_ops
from attnlib.sparse.key_selection import KeySelection
from attnlib.testing.batch_spec import parse_batch
from attnlib.testing.key_selection import make_lists

BATCH = "q1s37_q3s20_q2s75_q0s5_q1s1"


def _latents(count: int) -> torch.Tensor:
    latents = torch.randn(count, 576, generator=torch.Generator().manual_seed(0))
    # The interpreter truncates where a GPU rounds to bfloat16.
    latents[:, 512:] = latents[:, 512:].bfloat16().float()
    latents[0, :128] = 0.0
    latents[1] *= 1024.0
    latents[2, 130] = torch.nan
    latents[3, 200:260] *= 1e-6
    return latents


def test_bytes_of_a_token() -> None:
    """The layout of FlashMLA and vLLM: elements, scales, rotary part."""
    cache = PackedLatentCache.allocate(2, 4)
    latent = torch.zeros(1, 576)
    latent[0, 0], latent[0, 1], latent[0, 130], latent[0, 512] = 896.0, -2.0, 448.0, 1.5
    cache.write(latent, torch.tensor([6]))
    token = bytes(cache.data[1, 2].tolist())
    # 896 = 448 * 2 and -2 = -1 * 2 in the first group, 448 = 448 * 1 in the second one.
    assert token[:2] == bytes([0x7E, 0xB8]) and token[130] == 0x7E
    smallest = 2.0**-126
    assert struct.unpack("<4f", token[512:528]) == (2.0, 1.0, smallest, smallest)
    assert token[528:530] == bytes([0xC0, 0x3F])  # 1.5 in bfloat16
    assert not cache.data[0].any() and not cache.data[1, :2].any() and not cache.data[1, 3].any()
    unpacked = torch_ops.unpack_latents(cache.data, torch.float32)
    assert torch.equal(unpacked[1, 2, 0], latent[0])


def test_written_bytes_are_equal() -> None:
    """Both writes give the same bits, for zeros, large and small numbers and NaN; skipped slots and
    other blocks keep their bytes."""
    latents = _latents(12)
    slots = torch.tensor([3, 17, -1, 8, 0, 30, 5, -1, 21, 22])
    found = []
    for operations in (torch_ops, triton_ops):
        data = torch.full((4, 8, 656), 7, dtype=torch.uint8)
        operations.write_packed_latents(latents, data, slots)
        found.append(data)
    assert torch.equal(*found)
    rows = torch_ops.unpack_latents(found[0], torch.float32).flatten(0, 2)
    error = (rows[slots[4]] - latents[4]).abs()
    assert error[:512].max() <= latents[4, :512].abs().max() * 2**-4
    assert (rows[slots[1]] - latents[1]).abs().max() <= latents[1].abs().max() * 2**-4


CASES: dict[str, dict[str, Any]] = {
    "all keys": {},
    "one split": {"batch": "9q1s30"},
    "window, cap, sinks": {"window": (20, 0), "logits_soft_cap": 3.0, "sinks": True},
    "not causal, chunks": {"causal": False, "attention_chunk_size": 32},
    "tokens": {"selection": KeySelection(max_blocks=24)},
    "blocks of 3": {"selection": KeySelection(max_blocks=7, block_size=3), "sinks": True},
}


@pytest.mark.parametrize("name", CASES)
def test_attention_agrees_with_torch(name: str) -> None:
    """M4, M5, M6, M11 and M12 over dequantized latents; unused slots hold NaN (P5)."""
    options = dict(CASES[name])
    text, selection = options.pop("batch", BATCH), options.pop("selection", None)
    draw = torch.Generator().manual_seed(1)
    lengths, heads, block_size = parse_batch(text), 5, 8
    columns = -(-lengths.max_seq_len // block_size)
    blocks = lengths.num_reqs * columns
    data = torch.full((blocks, block_size, 656), 0xFF, dtype=torch.uint8)  # NaN
    table = torch.randperm(blocks, generator=draw).view(-1, columns).int()
    for row, length in zip(table, lengths.seq_lens, strict=True):
        places = torch.arange(length)
        slots = row[places // block_size].long() * block_size + places % block_size
        latents = torch.randn(length, 576, generator=draw)
        torch_ops.write_packed_latents(latents, data, slots)
    starts = torch.tensor([0, *lengths.query_lens]).cumsum(0).int()
    tokens = lengths.num_actual_tokens
    query = torch.randn(tokens + 3, heads, 576, generator=draw)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(heads, generator=draw)
    lists = None
    if selection is not None:
        lists = make_lists(selection, lengths, heads, 1, 1, False).to("cpu")
    found = []
    for operations in (torch_ops, triton_ops):
        out = torch.full((tokens + 3, heads, 512), torch.nan)
        lse = torch.full((tokens + 3, heads), torch.nan)
        operations.packed_latent_attention(
            query, data, table, starts, torch.tensor(lengths.seq_lens).int(),
            AttentionParams(scale=192**-0.5, **options), max_query_len=max(lengths.query_lens),
            max_seq_len=lengths.max_seq_len, out=out, lse=lse, selection=selection, selected=lists,
        )  # fmt: skip
        assert not out[tokens:].any() and (lse[tokens:] == -torch.inf).all()  # M6
        found.append((out, lse))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_refusals() -> None:
    """Nothing is written, and the message names the limit."""
    data = torch.zeros(2, 4, 656, dtype=torch.uint8)
    for operations in (torch_ops, triton_ops):
        with pytest.raises(ContractError, match="576"):
            operations.write_packed_latents(torch.zeros(1, 512), data, torch.tensor([0]))
        with pytest.raises(ContractError, match="one row per slot"):
            operations.write_packed_latents(torch.zeros(1, 576), data, torch.tensor([0, 1]))
        with pytest.raises(
            ContractError, match=r"slot_mapping\[1\]=8 is outside the cache of 8 slots"
        ):
            operations.write_packed_latents(torch.ones(2, 576), data, torch.tensor([0, 8]))
        with pytest.raises(ContractError, match="656"):
            operations.write_packed_latents(torch.ones(1, 576), data[..., :640], torch.tensor([0]))
    with pytest.raises(ContractError, match="multiple of 16"):
        PackedLatentCache(torch.zeros(2, 4, 660, dtype=torch.uint8)[..., :656])
    assert not data.any()
    step = (torch.zeros(1, 1).int(), torch.tensor([0, 1]).int(), torch.tensor([1]).int())
    options: dict[str, Any] = {"max_query_len": 1, "max_seq_len": 1}
    query, out = torch.zeros(1, 2, 576), torch.zeros(1, 2, 512)
    slopes = AttentionParams(scale=1.0, alibi_slopes=torch.ones(2))
    with pytest.raises(UnsupportedConfigError, match="alibi_slopes"):
        triton_ops.packed_latent_attention(query, data, *step, slopes, out=out, **options)
    with pytest.raises(ContractError, match="512"):
        triton_ops.packed_latent_attention(
            query, data, *step, AttentionParams(scale=1.0), out=out[..., :500], **options
        )
