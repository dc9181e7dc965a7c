"""Emulate decodes over latents (`emulate`) and compare them with the torch operations in float32.

`python -m tests.ops.triton.hopper.emulated_latents CASE...` prints one JSON line per case. It needs
a process that does not interpret Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction

from attnlib.ops.packed_latents import packed_views
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.packed_latents import (
    packed_latent_attention,
    unpack_latents,
    write_packed_latents,
)
from attnlib.ops.torch.paged_decode import paged_decode
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.hopper.latent_plan import prepare_latent_decode
from attnlib.ops.triton.launch.run import run_attention
from attnlib.testing.batch_spec import BatchSpec, parse_batch
from tests.ops.triton.cross_compile import stub_target
from tests.ops.triton.hopper.emulate import print_cases, run_emulated
from tests.ops.triton.hopper.emulated_latent_cases import CASES

__all__ = ["emulate_case"]


def _cache(
    lengths: BatchSpec, block_size: int, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(The cache `[B, N, 576]`, or `[B, N, 656]` of packed latents; the block table)."""
    draw = torch.Generator().manual_seed(0)
    columns = -(-lengths.max_seq_len // block_size)
    num_blocks = lengths.num_reqs * columns
    latents = torch.randn(num_blocks, block_size, 576 + options.get("gap", 0), generator=draw)
    table = torch.randperm(num_blocks, generator=draw).view(-1, columns)
    inside = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for blocks, length in zip(table, lengths.seq_lens, strict=True):
        inside[blocks] = (torch.arange(columns * block_size) < length).view(columns, block_size)
    if not options.get("packed"):
        cache = torch.where(inside[..., None], latents, torch.nan).to(options.get("cache", dtype))
        return cache[..., :576], table.int()
    powers = torch.randn(num_blocks, block_size, 4, generator=draw) * options.get("apart", 0.0) / 3
    latents[..., :512] *= torch.exp2(powers.clamp(-12, 12)).repeat_interleave(128, -1)
    data = torch.full((num_blocks, block_size, 656), 0xFF, dtype=torch.uint8)  # NaN
    slots = torch.where(inside.flatten(), torch.arange(inside.numel()), -1)
    write_packed_latents(latents.to(dtype).flatten(0, 1), data, slots)
    return data, table.int()


def _expected(
    query: torch.Tensor,
    cache: torch.Tensor,
    rounded: torch.dtype | None,
    batch: Any,
    bounds: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs and LSEs of the torch operations with float32 queries; packed latents are rounded
    to a dtype."""
    out, lse = torch.zeros(*query.shape[:2], 512), torch.zeros(query.shape[:2])
    if cache.dtype == torch.uint8 and rounded is None:
        packed_latent_attention(query.float(), cache, *batch, out=out, lse=lse, **bounds)
    else:
        key = cache.unsqueeze(2) if rounded is None else unpack_latents(cache, rounded)
        key = key if key.dtype.itemsize == 1 else key.float()
        paged_decode(query.float(), key, key[..., :512], *batch, out=out, lse=lse, **bounds)
    return out, lse


def emulate_case(name: str) -> dict[str, Any]:
    """Emulate a case.

    Returns:
        error: the largest one of an output, relative to the largest output of its row.
        lse_error: the largest one of an LSE.
        nan_rows, same_nan_rows: rows in which torch has NaN, and whether they are the same.
        padding: whether outputs after the last request are 0 and their LSEs -inf (M6).
    """
    options = dict(CASES[name])
    lengths, heads = parse_batch(options["batch"]), options["heads"]
    block_size, dtype = options.get("block_size", 64), options.get("dtype", torch.bfloat16)
    cache, table = _cache(lengths, block_size, dtype, options)
    if "broken" in options:
        last = lengths.seq_lens[0] - 1
        token = cache[int(table[0, last // block_size]), last % block_size].view(torch.uint8)
        # An element that is NaN, or a scale that is infinite.
        stored = [0, 0, 0x80, 0x7F] if options["broken"] >= 512 else [0x7F]
        token[options["broken"] :][: len(stored)] = torch.tensor(stored, dtype=torch.uint8)
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(lengths.num_actual_tokens + 3, heads, 576, generator=draw)
    query = (query * options.get("query_scale", 1.0)).to(dtype)
    starts = torch.tensor([0, *lengths.query_lens]).cumsum(0).int()
    lens, longest = torch.tensor(lengths.seq_lens).int(), max(lengths.query_lens)
    given = ("window", "logits_soft_cap", "causal", "k_scale", "v_scale")
    params = AttentionParams(
        scale=192**-0.5,
        sinks=torch.randn(heads, generator=draw) if options.get("sinks") else None,
        **{name: options[name] for name in given if name in options},
    )
    bounds: dict[str, Any] = {"max_query_len": longest, "max_seq_len": lengths.max_seq_len}
    batch = (table, starts, lens, params)
    rounded = dtype if options.get("packed") and "converted" in name else None
    expected, expected_lse = _expected(query, cache, rounded, batch, bounds)
    key = cache.unsqueeze(2)
    value = key[..., :512]
    if options.get("packed"):
        parts = packed_views(cache)
        key, value = parts.rotary.unsqueeze(2), parts.elements.unsqueeze(2)
    out, lse = torch.full_like(expected, torch.nan, dtype=dtype), torch.zeros(query.shape[:2])
    with stub_target("sm_90"):
        JITFunction.run = run_emulated
        tensors = BatchTensors.of(params, starts, lens, table, **bounds)
        call = AttentionCall.of(query, key, value, out, lse, tensors, params)
        tile = options.get("tile")
        run_attention(prepare_latent_decode(call, longest, options.get("ctas", 3), tile), call)
    nan = expected.isnan().any(-1)
    largest = expected.abs().amax(-1, keepdim=True).clamp(min=1e-20)
    error = ((out.float() - expected) / largest)[~nan].abs().max()
    lse_error = torch.where(lse == expected_lse, 0.0, lse - expected_lse)[~nan].abs().max()
    return {
        "error": float(error),
        "lse_error": float(lse_error),
        "nan_rows": int(nan.sum()),
        "same_nan_rows": bool((out.isnan().any(-1) == nan).all()),
        "padding": bool((out[-3:] == 0).all() and (lse[-3:] == -torch.inf).all()),
    }


if __name__ == "__main__":
    print_cases(CASES, emulate_case)
