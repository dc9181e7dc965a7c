"""The Hopper prefill with keys of 129 to 192 elements, which are kept in three parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill as torch_prefill
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.hopper_tiles import choose_hopper_tile
from attnlib.ops.triton.hopper.prefill_plan import prepare_hopper_prefill
from attnlib.ops.triton.launch.run import run_attention
from attnlib.testing.batch_spec import parse_batch
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

CASES: dict[str, dict[str, Any]] = {
    "expanded latents": {"sizes": (192, 128), "heads": (4, 4)},
    "blocks of 128, bidirectional": {"sizes": (192, 128), "block_size": 128, "causal": False},
    "blocks of 128": {"sizes": (192, 128), "block_size": 128},
    "groups of 4, blocks of 64": {"sizes": (192, 128), "heads": (8, 2), "block_size": 64},
    "a group of 64": {"sizes": (192, 128), "heads": (64, 1)},
    "float16": {"sizes": (192, 128), "dtype": torch.float16, "block_size": 128},
    "equal sizes": {"sizes": (192, 192), "heads": (8, 2)},
    "smallest size, staged output": {"sizes": (136, 64), "heads": (8, 2), "dtype": torch.float16},
    "group of 3, without a box of queries": {"sizes": (160, 128), "heads": (6, 2)},
    "group of 128": {"sizes": (176, 128), "heads": (128, 1)},
    "two accumulators": {"sizes": (192, 192), "heads": (8, 2), "tile": {}},
    "two accumulators, 160": {"sizes": (160, 160), "heads": (8, 2), "tile": {}},
    "two accumulators, 136, queries in shared memory": {
        "sizes": (136, 136),
        "heads": (8, 2),
        "tile": {"query_registers": False},
    },
    "two accumulators, 176, blocks of 128": {"sizes": (176, 176), "block_size": 128, "tile": {}},
    "two accumulators, 152, group of 3": {"sizes": (152, 152), "heads": (6, 2), "tile": {}},
    "two accumulators, 192 and 144": {"sizes": (192, 144), "block_size": 8, "tile": {}},
    "two accumulators, 144 and 192, bidirectional": {
        "sizes": (144, 192),
        "block_size": 256,
        "causal": False,
        "tile": {},
    },
    "two accumulators, float16, 184": {
        "sizes": (184, 184),
        "dtype": torch.float16,
        "tile": {},
    },
    "two accumulators by sign, chunks": {
        "sizes": (160, 160),
        "heads": (8, 2),
        "attention_chunk_size": 200,
        "tile": {"sign_softmax": True},
    },
    "two accumulators by sign, sinks": {
        "sizes": (192, 192),
        "heads": (8, 2),
        "sinks": True,
        "tile": {"sign_softmax": True},
    },
    "two accumulators, window, cap, sinks": {
        "sizes": (168, 168),
        "window": (100, 0),
        "logits_soft_cap": 20.0,
        "sinks": True,
        "tile": {},
    },
    "two accumulators, large cap": {"sizes": (192, 192), "logits_soft_cap": 100.0, "tile": {}},
    "window, cap, sinks": {
        "sizes": (192, 128),
        "window": (100, 0),
        "logits_soft_cap": 20.0,
        "sinks": True,
    },
}
TWO_ACCUMULATORS: dict[str, Any] = {"stages": 3, "query_registers": True, "two_accumulators": True}
BATCH = "q700s900_q1s40_q300_q130s1000_q64s64"


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_torch(name: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel needs compute capability 9.0")
    options = dict(CASES[name])
    (size, size_v), (heads, kv_heads) = options.pop("sizes"), options.pop("heads", (4, 4))
    block_size = options.pop("block_size", 16)
    dtype, tile_options = options.pop("dtype", torch.bfloat16), options.pop("tile", None)
    draw = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=draw).to(dtype)

    lengths = parse_batch(BATCH)
    columns = -(-lengths.max_seq_len // block_size)
    blocks = lengths.num_reqs * columns
    key = random(blocks, block_size, kv_heads, size)
    value = random(blocks, block_size, kv_heads, size_v)
    table = torch.randperm(blocks, device="cuda", generator=draw).view(-1, columns).int()
    # What lies past the end of a sequence must not count.
    positions = torch.arange(columns * block_size, device="cuda").view(columns, block_size, 1, 1)
    for row, length in zip(table.long(), lengths.seq_lens, strict=True):
        key[row] = torch.where(positions < length, key[row], torch.nan)
        value[row] = torch.where(positions < length, value[row], torch.nan)
    starts = torch.tensor([0, *lengths.query_lens], device="cuda").cumsum(0).int()
    seq_lens = torch.tensor(lengths.seq_lens, device="cuda").int()
    query = random(lengths.num_actual_tokens, heads, size)
    params = AttentionParams(scale=size**-0.5)
    if options.pop("sinks", False):
        params = dataclasses.replace(params, sinks=random(heads).float())
    params = dataclasses.replace(params, **options)

    expected = torch.empty(*query.shape[:2], size_v, device="cuda", dtype=dtype)
    out, lse = torch.full_like(expected, torch.nan), torch.empty(query.shape[:2], device="cuda")
    expected_lse = torch.empty_like(lse)
    sizes = {"max_query_len": lengths.max_query_len, "max_seq_len": lengths.max_seq_len}
    torch_prefill(
        query, key, value, table, starts, seq_lens, params, **sizes, out=expected,
        lse=expected_lse,
    )  # fmt: skip
    rows = lengths.max_query_len * heads // kv_heads
    tile = choose_hopper_tile(size, size_v, rows=rows, block_size=block_size)
    if tile_options is not None:
        tile = dataclasses.replace(tile, **(TWO_ACCUMULATORS | tile_options))
    batch = BatchTensors(starts, seq_lens, table, max_seq_len=lengths.max_seq_len)
    call = AttentionCall.of(query, key, value, out, lse, batch, params)
    run_attention(prepare_hopper_prefill(call, tile), call)
    error = float((out.float() - expected.float()).abs().max())
    print(f"{name}: max {error:.2g} lse {float((lse - expected_lse).abs().max()):.2g}")
    assert error < (2e-2 if dtype == torch.bfloat16 else 4e-3)
    assert torch.allclose(lse, expected_lse, atol=1e-3, rtol=0)
