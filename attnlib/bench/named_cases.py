"""The cases of the suites by kind."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from attnlib.bench.case import BenchCase
from attnlib.testing.batch_spec import BatchSpec, parse_batch

__all__ = [
    "ANCHORS",
    "ENTRIES",
    "FLOAT8",
    "FLOAT8_QUERIES",
    "FORMATS",
    "MLA",
    "QUICK",
    "SPARSE",
    "latent",
    "named",
    "ragged",
]


def ragged(count: int, shortest: int, longest: int, seed: int) -> BatchSpec:
    """Decodes of unequal lengths, mostly short; equal on every machine."""
    draw = random.Random(seed)
    lengths = tuple(shortest + int((longest - shortest) * draw.random() ** 2) for _ in range(count))
    return BatchSpec((1,) * count, lengths)


def named(*lines: tuple[str, str | BatchSpec, dict[str, Any]]) -> tuple[BenchCase, ...]:
    """Cases from (name, batch, fields)."""
    return tuple(
        BenchCase(
            name=name, batch=parse_batch(batch) if isinstance(batch, str) else batch, **fields
        )
        for name, batch, fields in lines
    )


_GPT_OSS: dict[str, Any] = {"num_heads": 64, "num_kv_heads": 8, "head_size": 64, "sinks": True}

_GEMMA: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 8, "head_size": 256}

_DECODE = named(
    ("decode-1x1k", "q1s1k", {}),
    ("decode-1x8k", "q1s8k", {}),
    ("decode-1x128k", "q1s128k", {}),
    ("decode-4x32k", "4q1s32k", {}),
    ("decode-8x8k", "8q1s8k", {}),
    ("decode-16x4k", "16q1s4k", {}),
    ("decode-32x4k", "32q1s4k", {}),
    ("decode-64x8k", "64q1s8k", {}),
    ("decode-128x2k", "128q1s2k", {}),
    ("decode-256x1k", "256q1s1k", {}),
    ("decode-ragged48", ragged(48, 200, 32 * 1024, seed=23), {}),
    ("decode-1x32k-64heads", "q1s32k", {"num_heads": 64}),
    ("decode-32x4k-mha", "32q1s4k", {"num_kv_heads": 32}),
    ("decode-32x8k-mqa", "32q1s8k", {"num_kv_heads": 1}),
    ("decode-32x8k-d64-w128-sinks", "32q1s8k", {**_GPT_OSS, "sliding_window": 128}),
    ("decode-32x8k-d64-sinks", "32q1s8k", _GPT_OSS),
    ("decode-32x8k-d256-cap50", "32q1s8k", {**_GEMMA, "logits_soft_cap": 50.0}),
    ("verify-16x4k", "16q4s4k", {}),
)

_LENGTHS = (
    ("1x2k", "q2k"),
    ("4x4k", "4q4k"),
    ("1x16k", "q16k"),
    ("1x32k", "q32k"),
    ("2k-over-32k", "q2ks32k"),
)

_FLOAT8_LENGTHS = tuple(
    (name, batch, page)
    for page in (16, 128)
    for name, batch in (("1x2k", "q2k"), ("1x8k", "q8k"), ("1x16k", "q16k"), ("1x32k", "q32k"))
)

_PREFILL = named(
    *(
        (f"prefill-{name}-p{page}", batch, {"block_size": page})
        for page in (16, 128)
        for name, batch in _LENGTHS
    ),
    ("prefill-1x8k-d64-sinks", "q8k", _GPT_OSS),
    ("prefill-1x8k-d64-w128-sinks", "q8k", {**_GPT_OSS, "sliding_window": 128}),
    ("prefill-1x8k-d256", "q8k", _GEMMA),
)

_MIXED = named(("mixed-60x4k-and-2k", "60q1s4k_q2k", {}))


def latent(heads: int) -> dict[str, Any]:
    """DeepSeek V3 on one of several GPUs: absorbed decode, scale of heads of 128 + 64."""
    return {
        "num_heads": heads,
        "num_kv_heads": 1,
        "head_size": 576,
        "head_size_v": 512,
        "block_size": 64,
        "mla": True,
        "scale": 192**-0.5,
    }


_EXPANDED: dict[str, Any] = {
    "num_heads": 128,
    "num_kv_heads": 128,
    "head_size": 192,
    "head_size_v": 128,
    "block_size": 128,  # of the keys that `LatentAttention` expands
}

MLA = named(
    ("mla-decode-1x8k-16heads", "q1s8k", latent(16)),
    ("mla-decode-32x4k-16heads", "32q1s4k", latent(16)),
    ("mla-decode-64x16k-16heads", "64q1s16k", latent(16)),
    ("mla-decode-1x8k-128heads", "q1s8k", latent(128)),
    ("mla-decode-32x4k-128heads", "32q1s4k", latent(128)),
    ("mla-decode-128x4k-128heads", "128q1s4k", latent(128)),
    *(
        (f"mla-decode-32x4k-{n}heads-e4m3", "32q1s4k", {**latent(n), "kv_cache_dtype": "fp8_e4m3"})
        for n in (16, 128)
    ),
    ("mla-verify-16x4k-16heads", "16q4s4k", latent(16)),
    ("mla-prefill-1x2k-128heads", "q2k", latent(128)),
    ("mla-prefill-1x8k-expanded", "q8k", _EXPANDED),
    ("mla-prefill-1x32k-expanded", "q32k", _EXPANDED),
)

_SELECTED: dict[str, Any] = {
    "num_heads": 64,
    "num_kv_heads": 4,
    "block_size": 64,
    "select": ("kv_head", 128, 16),
}

SPARSE = named(
    ("sparse-decode-1x32k-blocks", "q1s32k", _SELECTED),
    ("sparse-decode-1x1m-blocks", "q1s1024k", _SELECTED),
    ("sparse-decode-8x32k-blocks", "8q1s32k", _SELECTED),
    ("sparse-prefill-1x32k-blocks", "q32k", _SELECTED),
    (
        "sparse-decode-32x32k-latents",
        "32q1s32k",
        {**latent(64), "select": ("all_heads", 1, 2048)},
    ),
    (
        "sparse-decode-32x128k-latents",
        "32q1s128k",
        {**latent(64), "select": ("all_heads", 1, 2048)},
    ),
    (
        "sparse-prefill-4k-over-32k-latents",
        "q4ks32k",
        {**latent(64), "select": ("all_heads", 1, 2048)},
    ),
    (
        "sparse-prefill-4k-over-32k-latents-128heads",
        "q4ks32k",
        {**latent(128), "select": ("all_heads", 1, 2048)},
    ),
    (
        "sparse-prefill-4k-over-32k-latents-16heads",
        "q4ks32k",
        {**latent(16), "select": ("all_heads", 1, 2048)},
    ),
)

_TWO_STREAMS: dict[str, Any] = {
    **{"num_heads": 64, "num_kv_heads": 1, "head_size": 512, "block_size": 64},
    **{"mla": True, "sinks": True, "sliding_window": 128},
}
"""DeepSeek V4: keys are values; entries of 4 tokens of which 512 are selected, or of 128 tokens."""

ENTRIES = named(
    *(
        (f"streams-{name}-{kind}", batch, {**_TWO_STREAMS, "entries": entries})
        for kind, entries in (("selected512", (4, 64, 512)), ("rate128", (128, 64, 0)))
        for name, batch in (
            ("decode-1x32k", "q1s32k"),
            ("decode-32x32k", "32q1s32k"),
            ("decode-32x128k", "32q1s128k"),
            ("decode-128x32k", "128q1s32k"),
            ("prefill-2k-over-32k", "q2ks32k"),
        )
    )
)

FLOAT8 = tuple(
    replace(case, name=f"{name}-{case.name}", kv_cache_dtype=dtype)
    for name, dtype in (("e4m3", "fp8_e4m3"), ("e5m2", "fp8_e5m2"))
    for case in (
        *_DECODE,
        *named(*((f"prefill-{n}-p{p}", b, {"block_size": p}) for n, b, p in _FLOAT8_LENGTHS)),
    )
    if name == "e4m3" or case.name in ("decode-32x4k", "prefill-1x16k-p16")
)

FLOAT8_QUERIES = tuple(
    replace(case, name=f"fp8q-{case.name}", kv_cache_dtype="fp8_e4m3", fp8_queries=True)
    for case in (
        *(case for case in _DECODE if case.head_size == 128),
        *named(*((f"prefill-{n}-p{p}", b, {"block_size": p}) for n, b, p in _FLOAT8_LENGTHS)),
    )
)

FORMATS = tuple(
    replace(case, name=f"{name}-{case.name}", kv_cache_dtype=dtype)
    for case in (
        *(case for case in _DECODE if case.name in (
            "decode-8x8k", "decode-32x4k", "decode-64x8k", "decode-128x2k",
        )),
        *named(
            ("decode-32x8k", "32q1s8k", {}), ("decode-32x4k-p64", "32q1s4k", {"block_size": 64}),
            ("prefill-1x8k", "q8k", {}),
        ),
    )
    for name, dtype in (
        ("bf16", "auto"), ("int8", "int8_per_token_head"), ("fp8", "fp8_per_token_head"),
        ("int4", "int4_per_group"),
    )
) + tuple(
    replace(case, name=f"{name}-{case.name}", kv_cache_dtype=dtype)
    for case in named(
        ("decode-32x8k-d64-sinks", "32q1s8k", _GPT_OSS),
        *((f"prefill-1x{n}k-p128", f"q{n}k", {"block_size": 128}) for n in (8, 16, 32)),
    )
    for name, dtype in (("bf16", "auto"), ("e4m3", "fp8_e4m3"))
)  # fmt: skip


QUICK = (
    "decode-1x8k",
    "decode-32x4k",
    "decode-ragged48",
    "prefill-1x2k-p16",
    "prefill-1x16k-p16",
    "mixed-60x4k-and-2k",
)

ANCHORS = (*_DECODE, *_PREFILL, *_MIXED)
