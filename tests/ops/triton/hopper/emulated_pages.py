"""Emulate decodes over pages that hold their scales (`emulate`) and compare them with the torch
operation in float32.

`python -m tests.ops.triton.hopper.emulated_pages CASE...` prints one JSON line per case. It needs a
process that does not interpret Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction

from attnlib.cache.storage import PagedKVCache
from attnlib.kv_rotation import KVRotation
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.cache_write import write_kv
from attnlib.ops.torch.hadamard import rotate_heads
from attnlib.ops.torch.paged_decode import paged_decode
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.hopper_decode_tiles import DecodeTile
from attnlib.ops.triton.hopper.decode_plan import prepare_hopper_decode
from attnlib.ops.triton.launch.run import run_attention
from attnlib.spec import AttentionSpec
from attnlib.testing.batch_spec import BatchSpec, parse_batch
from tests.ops.triton.cross_compile import stub_target
from tests.ops.triton.hopper.early_decodes import EARLY, combine_splits, watched
from tests.ops.triton.hopper.emulate import print_cases, run_emulated
from tests.ops.triton.hopper.emulated_memory import EARLY_LOADS, LAST_WRITES

__all__ = ["CASES", "emulate_case"]

INT8, FP8, INT4, NVFP4 = "int8_per_token_head", "fp8_per_token_head", "int4_per_group", "nvfp4"
FLOAT4 = (NVFP4, "mxfp4")
FORMATS = (
    *((INT8, None), (FP8, None), (INT4, None), (INT8, INT4), (INT8, NVFP4)),
    *((name, None) for name in FLOAT4),
)
_ALL: dict[str, Any] = {"window": (99, 0), "logits_soft_cap": 20.0, "sinks": True}
_LAYERS: dict[str, dict[str, Any]] = {
    "one warp": {"tile": DecodeTile(64, 2, warps=2)},
    "one warp, all": {"batch": "2q1s300_q1s65", "tile": DecodeTile(32, 3, warps=2), **_ALL},
    "one warp, 2 tokens, blocks of 64": {
        "batch": "q2s500_q2s3_q1s9", "heads": (9, 3), "block_size": 64,
        "tile": DecodeTile(64, 2, warps=1),
    },
    "one warp, float16, gaps, tokens first": {
        "batch": "q1s200_q0s9_q1s70", "layout": "NHD_INTERLEAVED", "dtype": torch.float16,
        "tile": DecodeTile(32, 4, warps=2),
    },
    "one consumer": {"batch": "q1s300_q1s70", "tile": DecodeTile(64, 4)},
    "two consumers, 4 tokens, all": {
        "batch": "q4s300_q3s70_q4s5", "tile": DecodeTile(64, 3, 2), **_ALL,
    },
    "two consumers, blocks of 128, large values": {
        "batch": "q1s300_q1s70", "block_size": 128, "tile": DecodeTile(64, 3, 2),
        "value_scale": 100.0,
    },
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    f"{keys}{f',{values}' if values else ''}, {name}": {"keys": keys, "values": values, **options}
    for keys, values in FORMATS
    for name, options in _LAYERS.items()
    if values or keys in FLOAT4 or name in ("one warp, all", "two consumers, 4 tokens, all")
    if keys not in FLOAT4 or options["tile"].warps
}
_BOTH: dict[str, Any] = {"rotation": "hadamard@7"}
_ROTATED: dict[str, dict[str, Any]] = {
    "one warp, 2 tokens, blocks of 64": _BOTH,
    "one consumer": {**_BOTH, "batch": "q1s300_q1s70_q1s500", "counters": True},
    "two consumers, 4 tokens, all": _BOTH,
}
CASES |= {
    f"rotated {keys}{f',{values}' if values else ''}, {name}": {
        "keys": keys, "values": values, **_LAYERS[name], **options,
    }
    for keys, values in FORMATS
    for name, options in _ROTATED.items()
    if keys not in FLOAT4 or _LAYERS[name]["tile"].warps
}  # fmt: skip
CASES["mxfp4, values of 2^118"] = {
    "keys": "mxfp4", "values": None, "batch": "q1s300_q1s70", "value_scale": 2.0**118,
    "tile": DecodeTile(32, 3, warps=2), "sinks": True,
}  # fmt: skip
CASES |= {
    f"float8, {name}": {"keys": "fp8_e4m3", "values": None, **options}
    for name, options in {
        "blocks of 1": {"block_size": 1, "tile": DecodeTile(64, 3)},
        "blocks of 4, 4 tokens, all": {
            "batch": "q4s300_q3s70_q4s5", "block_size": 4, "tile": DecodeTile(128, 3), **_ALL,
        },
        "blocks of 8, one warp": {"block_size": 8, "tile": DecodeTile(32, 3, warps=2)},
        "blocks of 8, two consumers": {"block_size": 8, "tile": DecodeTile(64, 3, 2)},
        "one warp, all": {"batch": "2q1s300_q1s65", "tile": DecodeTile(64, 3, warps=4), **_ALL},
        "one warp, 2 tokens, blocks of 64": _LAYERS["one warp, 2 tokens, blocks of 64"],
        "blocks of 2, 80 elements": {
            "block_size": 2, "head_size": 80, "dtype": torch.float16, "tile": DecodeTile(64, 2),
        },
    }.items()
}  # fmt: skip
CASES |= {
    f"{rotation} int8, {size}": {
        "keys": INT8, "values": None, "head_size": size, "rotation": rotation, "tile": tile,
    }
    for rotation, size, tile in (
        ("hadamard_keys", 128, DecodeTile(64, 2, warps=2)),
        ("hadamard_values", 64, DecodeTile(64, 2, warps=2)),
        ("hadamard", 96, DecodeTile(64, 4)),
        ("hadamard", 64, DecodeTile(64, 3, 2)),
        ("hadamard", 128, DecodeTile(64, 3, 2)),
        ("hadamard@2", 128, DecodeTile(32, 2, warps=2, spare=1)),
        ("hadamard", 256, DecodeTile(64, 4)),
    )
}  # fmt: skip
CASES |= {
    f"rotated int8, a warp for queries, {name}": {
        "keys": INT8, "values": None, "rotation": "hadamard@3", "tile": DecodeTile(64, 3, 2),
        **options,
    }
    for name, options in {
        "many requests": {"batch": "q1s300_q0s9_q1s70_q1s64_q1s500_q1s1_q0s3_q1s33"},
        "combined": {"batch": "q1s300_q1s70_q1s900_q1s20_q1s640_q1s65", "counters": True},
        "2 tokens": {"batch": "q2s500_q1s3_q2s9_q2s130", "heads": (4, 2), "dtype": torch.float16},
        "3 KV heads": {"batch": "q1s300_q0s9_q1s70_q1s640", "heads": (12, 3), "counters": True},
        "one KV head": {"batch": "q1s300_q1s900_q1s70_q1s640", "heads": (4, 1)},
        "64 elements, all": {"batch": "2q1s300_q1s65", "head_size": 64, **_ALL},
    }.items()
}  # fmt: skip
"""Elements and scales after the end of a request are NaN or the largest bytes, and so are scales of
values in front of a window."""
CASES |= EARLY


def _cache(
    spec: AttentionSpec, lengths: BatchSpec, options: dict[str, Any]
) -> tuple[PagedKVCache, torch.Tensor]:
    """(A cache with the tokens of the requests, their block table)."""
    draw = torch.Generator().manual_seed(0)
    size, columns = spec.block_size, -(-lengths.max_seq_len // spec.block_size)
    cache = PagedKVCache.allocate(spec, lengths.num_reqs * columns, "cpu", options.get("layout"))
    pages = (cache.key_cache, cache.value_cache) if cache.pages is None else (cache.pages,)
    for page in pages:
        page.view(torch.uint8).fill_(0xFF)  # of float8 NaN
    table = torch.randperm(lengths.num_reqs * columns, generator=draw).view(-1, columns)
    scales = None if cache.pages is None else cache.block_views[-1].view(torch.uint8)
    rows = zip(table, lengths.seq_lens, lengths.query_lens, strict=True)
    for blocks, length, query_len in rows:
        position = torch.arange(length)
        shape = (length, spec.num_kv_heads, spec.head_size)
        key, value = torch.randn(2, *shape, generator=draw)
        value *= torch.randn(*shape[:2], 1, generator=draw).exp2() * options.get("value_scale", 1.0)
        write_kv(
            key, value, cache.key_cache, cache.value_cache,
            blocks[position // size] * size + position % size,
            k_scale=cache.k_scale, v_scale=cache.v_scale,
        )  # fmt: skip
        if "window" in options and scales is not None:
            hidden = torch.arange(max(0, length - query_len - options["window"][0]))
            scales[blocks[hidden // size], hidden % size] = 0xFF
    return cache, table.int()


def emulate_case(name: str) -> dict[str, Any]:
    """Emulate a case.

    Returns:
        error: the largest one of an output, relative to the largest output of its row.
        lse_error: the largest one of an LSE.
        finite: whether no output is NaN.
        padding: whether outputs after the last request are 0 and their LSEs -inf (M6).
        early: partitions that load boxes before they wait for the kernel before, sorted.
    """
    options = dict(CASES[name])
    lengths = parse_batch(options.get("batch", "q1s200_q1s70"))
    (heads, kv_heads), size = options.get("heads", (8, 2)), options.get("head_size", 128)
    dtype, draw = options.get("dtype", torch.bfloat16), torch.Generator().manual_seed(1)
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_size=size, dtype=dtype,
        kv_cache_dtype=options["keys"], value_cache_dtype=options["values"],
        block_size=options.get("block_size", 16),
    )  # fmt: skip
    rotation = KVRotation.of(options.get("rotation"))
    cache, table = _cache(spec, lengths, options)
    query = torch.randn(lengths.num_actual_tokens + 3, heads, size, generator=draw).to(dtype)
    starts = torch.tensor([0, *lengths.query_lens]).cumsum(0).int()
    lens, longest = torch.tensor(lengths.seq_lens).int(), max(lengths.query_lens)
    params = AttentionParams(
        scale=size**-0.5,
        window=options.get("window", (-1, -1)),
        logits_soft_cap=options.get("logits_soft_cap", 0.0),
        sinks=torch.randn(heads, generator=draw) if options.get("sinks") else None,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        rotation=rotation,
    )
    bounds: dict[str, Any] = {"max_query_len": longest, "max_seq_len": lengths.max_seq_len}
    views = (cache.key_cache, cache.value_cache)
    expected, expected_lse = torch.zeros(query.shape), torch.zeros(query.shape[:2])
    outputs = {"out": expected, "lse": expected_lse}
    wide = query.float()
    if rotation is not None and rotation.keys:
        wide = rotate_heads(query, rotation.seed).float()
    paged_decode(wide, *views, table, starts, lens, params, **outputs, **bounds)
    if rotation is not None and rotation.values:
        expected = rotate_heads(expected, rotation.seed, inverse=True)
    out, lse = torch.full_like(query, torch.nan), torch.zeros(query.shape[:2])
    EARLY_LOADS.clear()
    with stub_target("sm_90"):
        JITFunction.run = run_emulated
        workspace = torch.full((1 << 20,), torch.nan)
        counters = torch.zeros(1024, dtype=torch.int32) if options.get("counters") else None
        scratch = {"workspace": workspace, "counters": counters}
        batch = BatchTensors.of(params, starts, lens, table, **scratch, **bounds)
        if "early" in options:
            leaves, written = bool(options.get("uncombined")), query.clone()
            batch = batch._replace(early=True, uncombined=leaves)
            query.fill_(torch.nan)
            LAST_WRITES.append(lambda: query.copy_(written))
        call = AttentionCall.of(query, *views, out, lse, batch, params)
        count = 0 if counters is None else counters.numel()
        prepared = prepare_hopper_decode(call, options["tile"], longest, 3, count)
        combines = (prepared.combine is not None, prepared.split_rows > 0)
        assert combines == (not (count or batch.uncombined), batch.uncombined), combines
        with watched(query):
            run_attention(prepared, call)
        combine_splits(prepared.splits(batch), out, lse, kv_heads)
        LAST_WRITES.clear()
    largest = expected.abs().amax(-1, keepdim=True).clamp(min=1e-20)
    return {
        "error": float(((out.float() - expected) / largest).abs().max()),
        "lse_error": float(torch.where(lse == expected_lse, 0.0, lse - expected_lse).abs().max()),
        "finite": bool(out.isfinite().all()),
        "padding": bool((out[-3:] == 0).all() and (lse[-3:] == -torch.inf).all()),
        "early": sorted(EARLY_LOADS),
    }


if __name__ == "__main__":
    print_cases(CASES, emulate_case)
