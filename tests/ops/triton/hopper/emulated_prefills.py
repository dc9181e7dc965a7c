"""Emulate prefills of heads of 128 to 192 elements (`emulate`) and compare them with the torch
operation in float32.

`python -m tests.ops.triton.hopper.emulated_prefills CASE...` prints one JSON line per case. It
needs a process that does not interpret Triton.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.hopper_tiles import choose_hopper_tile
from attnlib.ops.triton.hopper.prefill_plan import prepare_hopper_prefill
from attnlib.ops.triton.launch.run import run_attention
from attnlib.testing.batch_spec import parse_batch
from tests.ops.triton.cross_compile import stub_target
from tests.ops.triton.hopper.emulate import print_cases, run_emulated

__all__ = ["CASES", "emulate_case"]

CASES: dict[str, dict[str, Any]] = {
    "192": {"sizes": (192, 192)},
    "160, sinks": {"sizes": (160, 160), "sinks": True},
    "136, queries in shared memory": {"sizes": (136, 136), "tile": {"query_registers": False}},
    "176 and 136, 3 heads": {"sizes": (176, 136), "heads": (3, 1)},
    "152 and 192, window": {"sizes": (152, 192), "window": (30, 0)},
    "160 and 176, cap, blocks of 128": {
        "sizes": (160, 176), "logits_soft_cap": 20.0, "block_size": 128,
    },
    "144, float16, splits": {"sizes": (144, 144), "dtype": torch.float16, "splits": 3},
    "128, splits that one warp combines, sinks": {"sizes": (128, 128), "sinks": True, "splits": 3},
}  # fmt: skip
BATCH = "q70s200_q1s40_q33"


def emulate_case(name: str) -> dict[str, Any]:
    """Emulate a case.

    Returns:
        error, lse_error: the largest ones of an output and of an LSE.
        padding: whether outputs after the last request are 0 (M6).
        columns: of the second accumulator.
    """
    options = dict(CASES[name])
    (size, size_v), (heads, kv_heads) = options.pop("sizes"), options.pop("heads", (4, 2))
    block_size, dtype = options.pop("block_size", 16), options.pop("dtype", torch.bfloat16)
    tile_options, splits = options.pop("tile", {}), options.pop("splits", 1)
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    lengths = parse_batch(BATCH)
    columns = -(-lengths.max_seq_len // block_size)
    blocks = lengths.num_reqs * columns
    key = random(blocks, block_size, kv_heads, size)
    value = random(blocks, block_size, kv_heads, size_v)
    table = torch.randperm(blocks, generator=draw).view(-1, columns).int()
    positions = torch.arange(columns * block_size).view(columns, block_size, 1, 1)
    for row, length in zip(table.long(), lengths.seq_lens, strict=True):
        key[row] = torch.where(positions < length, key[row], torch.nan)
        value[row] = torch.where(positions < length, value[row], torch.nan)
    starts = torch.tensor([0, *lengths.query_lens]).cumsum(0).int()
    seq_lens = torch.tensor(lengths.seq_lens).int()
    tokens = lengths.num_actual_tokens
    query = random(tokens + 3, heads, size)
    sinks = random(heads).float() if options.pop("sinks", False) else None
    params = AttentionParams(scale=size**-0.5, sinks=sinks, **options)
    bounds = {"max_query_len": lengths.max_query_len, "max_seq_len": lengths.max_seq_len}
    expected, expected_lse = torch.zeros(tokens, heads, size_v), torch.zeros(tokens, heads)
    paged_prefill(
        query[:tokens].float(), key.float(), value.float(), table, starts, seq_lens, params,
        **bounds, out=expected, lse=expected_lse,
    )  # fmt: skip
    out = torch.full((tokens + 3, heads, size_v), torch.nan, dtype=dtype)
    lse = torch.zeros(tokens + 3, heads)
    tile = choose_hopper_tile(size, size_v, rows=1 << 20, block_size=block_size)
    tile = dataclasses.replace(tile, **tile_options)
    with stub_target("sm_90"):
        JITFunction.run = run_emulated
        batch = BatchTensors(starts, seq_lens, table, max_seq_len=lengths.max_seq_len)
        call = AttentionCall.of(query, key, value, out, lse, batch, params)
        prepared = prepare_hopper_prefill(call, tile, num_splits=splits)
        run_attention(prepared, call)
    return {
        "error": float((out[:tokens].float() - expected).abs().max()),
        "lse_error": float((lse[:tokens] - expected_lse).abs().max()),
        "padding": bool((out[tokens:] == 0).all()),
        "columns": prepared.attend._constants["CONFIG"].REST_COLUMNS,
    }


if __name__ == "__main__":
    print_cases(CASES, emulate_case)
