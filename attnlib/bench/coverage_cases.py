"""Small or uneven batches and sizes beside the published rows, and small cases for CPUs."""

from __future__ import annotations

from typing import Any

from attnlib.bench.named_cases import named, ragged

__all__ = ["COVERAGE", "CPU"]

_WIDE: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 4, "head_size": 512}

COVERAGE = named(
    ("cov-prefill-1x8k-cap30", "q8k", {"logits_soft_cap": 30.0}),
    ("cov-prefill-1x8k-d80", "q8k", {"head_size": 80}),
    ("cov-prefill-1x8k-d96-mha", "q8k", {"head_size": 96, "num_kv_heads": 32}),
    ("cov-prefill-1x8k-d112", "q8k", {"head_size": 112}),
    ("cov-prefill-1x8k-d64", "q8k", {"num_heads": 64, "head_size": 64}),
    ("cov-prefill-512-over-20k-and-3k", "q512s20k_q512s3k", {}),
    ("cov-mixed-8x1k-and-300", "8q1s1k_q300", {}),
    ("cov-decode-48x5k-28heads", "48q1s5k", {"num_heads": 28, "num_kv_heads": 4}),
    ("cov-decode-32x4k-d96-mha", "32q1s4k", {"head_size": 96, "num_kv_heads": 32}),
    ("cov-decode-1x60k-and-31x500", "q1s60k_31q1s500", {}),
    ("cov-verify-24x8-over-2k", "24q8s2k", {}),
    ("cov-prefill-1x8k-p16", "q8k", {}),
    ("cov-prefill-1x8k-p8", "q8k", {"block_size": 8}),
    ("cov-prefill-1x8k-p1", "q8k", {"block_size": 1}),
    ("cov-decode-32x4k-p8", "32q1s4k", {"block_size": 8}),
    ("cov-decode-32x4k-p1", "32q1s4k", {"block_size": 1}),
    ("cov-prefill-1x4k-d512", "q4k", _WIDE),
    ("cov-decode-32x4k-d512", "32q1s4k", _WIDE),
    ("cov-decode-32x16k-w4096", "32q1s16k", {"sliding_window": 4096}),
    ("cov-prefill-1x16k-w4096", "q16k", {"sliding_window": 4096}),
    ("cov-prefill-1x8k-bidirectional", "q8k", {"causal": False}),
    ("cov-prefill-1x8k-unpaged", "q8k", {"causal": False, "unpaged": True}),
    ("cov-prefill-1x128k-p128", "q128k", {"block_size": 128}),
)

_SMALL: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"}

CPU = named(
    ("cpu-decode-1x512", "q1s512", _SMALL),
    ("cpu-decode-8x256", "8q1s256", _SMALL),
    ("cpu-decode-ragged", ragged(6, 20, 600, seed=0), _SMALL),
    ("cpu-verify-4x256", "4q4s256", _SMALL),
    ("cpu-prefill-1x256", "q256", _SMALL),
    ("cpu-prefill-64-over-512", "q64s512", _SMALL),
    ("cpu-prefill-1x256-w32-sinks", "q256", {**_SMALL, "sliding_window": 32, "sinks": True}),
    ("cpu-mixed-4x256-and-128", "4q1s256_q128", _SMALL),
    (
        "cpu-mixed-4x256-streams",
        "4q1s256_q32s256",
        {**_SMALL, "sinks": True, "sliding_window": 32, "entries": (4, 16, 8)},
    ),
    ("cpu-mixed-4x256-selected", "4q1s256_q32s256", {**_SMALL, "select": ("kv_head", 16, 4)}),
)
