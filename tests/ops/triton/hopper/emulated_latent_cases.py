"""The cases of `emulated_latents`."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.ops.triton.hopper.latent_tiles import (
    COLUMNS_32,
    CONVERTED,
    CONVERTED_COLUMNS,
    HALVED,
    ONE_WORKER,
)

__all__ = ["CASES"]

E4M3, E5M2, FP16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16
_LIMITS: dict[str, Any] = {"window": (99, 0), "logits_soft_cap": 20.0}
CASES: dict[str, dict[str, Any]] = {
    "16 heads": {"batch": "q1s200_q1s70", "heads": 16},
    "16 heads, e4m3": {"batch": "q1s200_q1s70", "heads": 16, "cache": E4M3},
    "16 heads, e4m3, one worker": {
        "batch": "q1s200_q1s70", "heads": 16, "cache": E4M3,
        "tile": ONE_WORKER,
    },
    "5 heads, 3 tokens, e5m2, float16, blocks of 256, sinks": {
        "batch": "4q3s200_q1s3", "heads": 5, "cache": E5M2, "dtype": FP16, "block_size": 256,
        "sinks": True,
    },
    "32 heads, e4m3, blocks of 16": {
        "batch": "2q1s300_q1s65", "heads": 32, "cache": E4M3, "block_size": 16,
    },
    "16 heads, e4m3, long ranges": {
        "batch": "q1s1500_q1s70", "heads": 16, "cache": E4M3, "ctas": 1,
    },
    "16 heads, packed, long ranges": {
        "batch": "q1s1500_q1s70", "heads": 16, "packed": True, "ctas": 1,
    },
    "16 heads, long ranges": {"batch": "q1s1500_q1s70", "heads": 16, "ctas": 1},
    "16 heads, packed": {"batch": "q1s200_q1s70", "heads": 16, "packed": True},
    "32 heads, packed, blocks of 16, sinks": {
        "batch": "2q1s300_q1s65", "heads": 32, "packed": True, "block_size": 16, "sinks": True,
    },
    "16 heads, e4m3, NaN in a latent": {
        "batch": "q1s200_q1s70", "heads": 16, "cache": E4M3, "broken": 200,
    },
    "16 heads, packed, infinite scale": {
        "batch": "q1s200_q1s70", "heads": 16, "packed": True, "broken": 524,
    },
    "16 heads, packed, scales apart": {
        "batch": "q1s200_q1s70", "heads": 16, "packed": True, "apart": 12.0,
    },
    "64 heads, 3 tokens, e4m3, not causal, rising scores, converted": {
        "batch": "q3s300_q3s65", "heads": 64, "cache": E4M3, "ctas": 6, "causal": False,
        "query_scale": 10.0, "tile": CONVERTED,
    },
    "128 heads, e4m3, scales, gaps, ragged, converted": {
        "batch": "q1s1_q1s300_q0s9_q1s64", "heads": 128, "cache": E4M3, "ctas": 5, "gap": 64,
        "k_scale": torch.tensor([0.25]), "v_scale": torch.tensor([3.0]), "tile": CONVERTED,
    },
    "5 heads, 8 tokens, e5m2, float16, blocks of 256, sinks, converted": {
        "batch": "4q3s200_q8s9", "heads": 5, "cache": E5M2, "dtype": FP16, "block_size": 256,
        "sinks": True, "tile": CONVERTED,
    },
    "16 heads, up to 8 tokens, e4m3, blocks of 16, window, cap, converted": {
        "batch": "2q8s300_q8s9", "heads": 16, "cache": E4M3, "ctas": 6, "block_size": 16,
        "tile": CONVERTED, **_LIMITS,
    },
    "128 heads, e4m3, NaN in a latent, long ranges, converted": {
        "batch": "q1s400_q1s300", "heads": 128, "cache": E4M3, "broken": 200, "ctas": 2,
        "tile": CONVERTED,
    },
    "128 heads, packed, long ranges, converted": {
        "batch": "q1s900", "heads": 128, "packed": True, "ctas": 2,
        "tile": CONVERTED,
    },
    "32 heads, up to 4 tokens, packed, window, cap, converted": {
        "batch": "q4s4_q1s297_q4s130_q3s64", "heads": 32, "packed": True, "ctas": 4,
        "tile": CONVERTED, **_LIMITS,
    },
    "16 heads, e4m3, scales, gaps, ragged, converted": {
        "batch": "q1s1_q1s300_q0s9_q1s64", "heads": 16, "cache": E4M3, "ctas": 5, "gap": 64,
        "k_scale": torch.tensor([0.25]), "v_scale": torch.tensor([3.0]), "tile": CONVERTED_COLUMNS,
    },
    "5 heads, 3 tokens, e5m2, float16, blocks of 16, window, cap, converted": {
        "batch": "4q3s200_q1s3", "heads": 5, "cache": E5M2, "dtype": FP16, "block_size": 16,
        "tile": CONVERTED_COLUMNS, **_LIMITS,
    },
    "16 heads, packed, long ranges, converted": {
        "batch": "q1s1500_q1s70", "heads": 16, "packed": True, "ctas": 1,
        "tile": CONVERTED_COLUMNS,
    },
    "32 heads, packed, sinks, NaN in a latent, converted": {
        "batch": "q1s200_q1s70", "heads": 32, "packed": True, "sinks": True, "broken": 200,
        "tile": CONVERTED_COLUMNS._replace(rows=32, stages=10),
    },
    "128 heads, prefills, sinks, more blocks than multiprocessors": {
        "batch": "q3s300_q0s5_q2s2_q1s130", "heads": 128, "sinks": True, "ctas": 1,
    },
    "5 heads, prefills, blocks of 16, window, cap, more blocks than multiprocessors": {
        "batch": "q40s170_q9s300", "heads": 5, "block_size": 16, "ctas": 2, **_LIMITS,
    },
    "64 heads, prefills, e4m3, not causal, more blocks than multiprocessors, converted": {
        "batch": "q3s300_q1s65", "heads": 64, "cache": E4M3, "ctas": 2, "causal": False,
        "tile": CONVERTED,
    },
    "128 heads, prefills, packed, more blocks than multiprocessors, converted": {
        "batch": "q3s300_q1s65", "heads": 128, "packed": True, "ctas": 2, "tile": CONVERTED,
    },
    "64 heads, 2 tokens, ranges of one pair": {
        "batch": "q2s300_q2s5", "heads": 64, "ctas": 16, "sinks": True,
    },
    "128 heads, many requests, sinks": {
        "batch": "12q1s140_5q1s300_q0s9_q1s70", "heads": 128, "sinks": True, "ctas": 6,
        "query_scale": 0.3,  # of 2304 rows some have more than 1.5 roundings with few large weights
    },
    "32 heads, 4 tokens, many requests": {"batch": "9q4s300_3q3s70", "heads": 32, "ctas": 4},
    "96 heads, 2 tokens, sinks": {"batch": "q2s200_q1s70", "heads": 96, "sinks": True, "ctas": 4},
    "32 heads": {
        "batch": "2q1s300_q1s65", "heads": 32, "tile": COLUMNS_32,
    },
    "128 heads, packed, scales apart, converted": {
        "batch": "q1s200_q1s70", "heads": 128, "packed": True, "ctas": 4, "apart": 12.0,
        "tile": CONVERTED,
    },
    "64 heads, e4m3, large queries, sinks, converted": {
        "batch": "q1s200_q1s70", "heads": 64, "cache": E4M3, "query_scale": 1e9, "sinks": True,
        "k_scale": torch.tensor([1e-9]), "tile": CONVERTED,
    },
    "48 heads, e5m2, small queries, long ranges, converted": {
        "batch": "q1s700_q1s70", "heads": 48, "cache": E5M2, "query_scale": 1e-30, "ctas": 1,
        "k_scale": torch.tensor([1e30]), "tile": CONVERTED,
    },
    "128 heads, packed, infinite scale, converted": {
        "batch": "q1s200_q1s70", "heads": 128, "packed": True, "broken": 524, "ctas": 4,
        "tile": CONVERTED,
    },
}  # fmt: skip
"""`ctas` run, three by default. Rings are passed several times in long ranges. `apart`: scales of
groups differ by up to this power of two each way. `broken`: a byte of the last latent of the first
request. Latents after the end of a request are NaN."""
CASES |= {
    name.replace("converted", "halved"): {**options, "tile": HALVED}
    for name, options in CASES.items()
    if options.get("tile") is CONVERTED and not options.keys() & {"packed", "dtype"}
}
