"""Tiles of the Hopper decode over float8 and packed latents, next to the decode over bfloat16.

    python -m benchmarks.gpu.latent_tiles --out latent_tiles.json --limit-seconds 120
    python -m benchmarks.gpu.latent_tiles '16 heads, *'

Processes compile the kernels first, side by side. Times are medians of replays of CUDA graphs, in
turn, over copies of the cache that do not fit the L2 cache. `to_bfloat16` is the time of a tile
relative to that of the same batch over bfloat16, `error` the largest difference of an output from
that of torch for the first requests, in units of their largest output.
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from attnlib.bench.timer import GraphTimer, measure_in_turn, warm_up
from attnlib.ops.packed_latents import packed_views
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_decode import paged_decode
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.hopper.latent_plan import prepare_latent_decode
from attnlib.ops.triton.hopper.latent_tiles import (
    CONVERTED,
    CONVERTED_COLUMNS,
    HALVED,
    ONE_WORKER,
    SAME_LATENTS,
    TWO_WORKERS,
    LatentTile,
    choose_latent_tile,
)
from attnlib.ops.triton.launch.run import run_attention
from attnlib.ops.triton.packed_latents import write_packed_latents
from benchmarks.gpu import rows

BLOCK_SIZE = 64
BATCHES = {
    "16 heads, 32 x 4k": (16, 32, 4096), "16 heads, 64 x 16k": (16, 64, 16384),
    "16 heads, 1 x 8k": (16, 1, 8192), "16 heads, 32 x 1k": (16, 32, 1024),
    "32 heads, 32 x 4k": (32, 32, 4096), "32 heads, 64 x 16k": (32, 64, 16384),
    "32 heads, 1 x 8k": (32, 1, 8192), "32 heads, 128 x 2k": (32, 128, 2048),
    "64 heads, 1 x 8k": (64, 1, 8192), "64 heads, 64 x 8k": (64, 64, 8192),
    "64 heads, 128 x 2k": (64, 128, 2048),
    "128 heads, 32 x 4k": (128, 32, 4096), "128 heads, 128 x 4k": (128, 128, 4096),
}  # fmt: skip
"""Query heads, requests, keys."""
_TILES = {
    16: {
        "e4m3, two workers": TWO_WORKERS,
        "e4m3, one worker": ONE_WORKER,
        "e4m3, converted": CONVERTED_COLUMNS,
        "packed, in registers": choose_latent_tile(16, 1, True, True),
        "packed, converted": CONVERTED_COLUMNS,
    },
    32: {
        "e4m3, same latents": SAME_LATENTS,
        "e4m3, converted": CONVERTED_COLUMNS._replace(rows=32, stages=10),
        "packed, in registers": choose_latent_tile(32, 1, True, True),
    },
    64: {
        "e4m3, converted": CONVERTED,
        "e4m3, halved": HALVED,
        "packed, converted": CONVERTED,
    },
}
"""Tiles by query rows of a CTA, at least as many as the heads. Names begin with the form of the
cache."""
_COLD_BYTES = 256 << 20


def _tiles(heads: int) -> dict[str, tuple[str, LatentTile | None]]:
    """Name -> (form of the cache, tile)."""
    tiles = _TILES[min(64, heads)]
    return {
        "bfloat16": ("bfloat16", None),
        **{name: (name.split(",")[0], tile) for name, tile in tiles.items()},
    }


def _caches(form: str, shape: tuple[int, int], copies: int) -> list[tuple[torch.Tensor, ...]]:
    """(Keys, values) of copies of a cache of blocks `shape`, as the kernel takes them, and the
    scales of packed latents."""
    found: list[tuple[torch.Tensor, ...]] = []
    for number in range(copies):
        torch.manual_seed(number)
        latents = torch.randn(*shape, 576, device="cuda", dtype=torch.bfloat16)
        if form == "packed":
            data = torch.empty(*shape, 656, device="cuda", dtype=torch.uint8)
            slots = torch.arange(shape[0] * shape[1], device="cuda")
            write_packed_latents(latents.flatten(0, 1), data, slots)
            parts = packed_views(data)
            found.append((parts.rotary.unsqueeze(2), parts.elements.unsqueeze(2), parts.scales))
        else:
            key = latents if form == "bfloat16" else latents.to(torch.float8_e4m3fn)
            found.append((key.unsqueeze(2), key.unsqueeze(2)[..., :512]))
    return found


def _exact(
    keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """The latents of a cache in float32."""
    if scales is None:
        return keys.float()
    elements = values.float().view(*values.shape[:3], 4, 128) * scales[:, :, None, :, None]
    return torch.cat((elements.flatten(-2), keys.float()), -1)


def _run(row: str, names: list[str], copies: int) -> dict[str, Any]:
    """Name -> call of `copies` caches, and the outputs of each."""
    heads, requests, length = BATCHES[row]
    columns = -(-length // BLOCK_SIZE)
    shape = (requests * columns, BLOCK_SIZE)
    torch.manual_seed(0)
    query = torch.randn(requests, heads, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(shape[0], device="cuda").view(requests, columns).int()
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32)
    lens = torch.full((requests,), length, device="cuda", dtype=torch.int32)
    params, out = AttentionParams(scale=192**-0.5), torch.empty_like(query[..., :512])
    space = torch.empty(256 << 20, device="cuda", dtype=torch.uint8)
    batch = BatchTensors.of(
        *(params, starts, lens, table), max_query_len=1, max_seq_len=length, workspace=space
    )
    calls: dict[str, Any] = {}
    found = {form: _caches(form, shape, copies) for form in {_tiles(heads)[n][0] for n in names}}
    for name in names:
        form, tile = _tiles(heads)[name]
        made = [
            AttentionCall.of(query, each[0], each[1], out, None, batch, params)
            for each in found[form]
        ]
        prepared = prepare_latent_decode(made[0], 1, None, tile)

        def call(number: int, made: Any = made, prepared: Any = prepared) -> torch.Tensor:
            run_attention(prepared, made[number])
            return out

        calls[name] = call
    few = min(2, requests)
    expected = {}
    for form, caches in found.items():
        keys = _exact(*caches[0])
        expected[form] = torch.empty_like(out[:few], dtype=torch.float32)
        paged_decode(
            query[:few].float(), keys, keys[..., :512], table[:few], starts[: few + 1], lens[:few],
            params, max_query_len=1, max_seq_len=length, out=expected[form],
        )  # fmt: skip
    return {"calls": calls, "expected": {name: expected[_tiles(heads)[name][0]] for name in names}}


def _compile(row: str, name: str) -> None:
    _run(row, [name], 1)["calls"][name](0)
    torch.cuda.synchronize()


def compile_all(chosen: list[str]) -> None:
    """Fill Triton's cache, side by side: every tile of a number of heads, and every batch, whose
    splits are combined by different kernels."""
    first = {BATCHES[row][0]: row for row in reversed(chosen)}
    jobs = [(row, name) for heads, row in first.items() for name in _tiles(heads)]
    jobs += [(row, "bfloat16") for row in chosen if row not in first.values()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(14, len(jobs)), context) as pool:
        for job in [pool.submit(_compile, *each) for each in jobs]:
            job.result()


def measure(row: str) -> dict[str, Any]:
    """Microseconds of each tile."""
    heads, requests, length = BATCHES[row]
    names, device = list(_tiles(heads)), torch.device("cuda")
    copies = min(16, max(2, -(-_COLD_BYTES // (requests * length * 576))))
    made = _run(row, names, copies)
    calls, expected = made["calls"], made["expected"]
    errors = {}
    for name, call in calls.items():
        found, exact = call(0)[:2].float(), expected[name]
        errors[name] = float((found - exact).abs().max() / exact.abs().max())
    waits = {name: warm_up(call, device) for name, call in calls.items()}
    timers = {name: GraphTimer(one, copies, device, waits[name]) for name, one in calls.items()}
    us = {name: found.us for name, found in measure_in_turn(timers, waits).items()}
    ratios = {name: us[name] / us["bfloat16"] for name in names}
    return {"us": us, "to_bfloat16": ratios, "error": errors}


def main() -> int:
    options = rows.parser(__doc__).parse_args()
    if not options.list:
        compile_all(rows.choose(BATCHES, options.rows))
    return rows.run(options, BATCHES, partial(measure))


if __name__ == "__main__":
    sys.exit(main())
