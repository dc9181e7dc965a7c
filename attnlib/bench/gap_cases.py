"""Rows on which another backend was faster, each with the target that it must reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attnlib.bench.case import BenchCase
from attnlib.bench.named_cases import ENTRIES, latent, named
from attnlib.bench.targets import Target

__all__ = ["GAPS", "GAP_TARGETS"]

_Rows = tuple[BenchCase, ...]
_Part = tuple[_Rows, dict[str, Target]]

_BATCHES = (
    ("1x2k", "q{}s2k"),
    ("1x32k", "q{}s32k"),
    ("16x8k", "16q{}s8k"),
    ("32x4k", "32q{}s4k"),
    ("128x2k", "128q{}s2k"),
)


def _against_peers(cases: _Rows, limit: float) -> _Part:
    """The cases, whose time may be at most `limit` times that of the best other backend."""
    return cases, {case.name: Target(limit) for case in cases}


def _changed(cases: _Rows, ending: str, **changes: Any) -> _Rows:
    """The cases with other fields, and an ending of their names."""
    return tuple(replace(case, name=f"{case.name}-{ending}", **changes) for case in cases)


def _against_own(cases: _Rows, ending: str, limit: float, **changes: Any) -> _Part:
    """The cases beside changed ones, whose time may be at most `limit` times that of their own."""
    changed = _changed(cases, ending, **changes)
    pairs = zip(cases, changed, strict=True)
    return (*cases, *changed), {other.name: Target(limit, case.name) for case, other in pairs}


def _rounded(cases: _Rows, limit: float) -> _Part:
    """The cases over a float8 cache, where queries may be rounded as XQA does."""
    changed = tuple(
        replace(case, name=f"{case.name}-fp8q", kv_cache_dtype="fp8_e4m3", fp8_queries=True)
        for case in cases
    )
    return _against_peers(changed, limit)


_VERIFY = named(
    *(
        (f"gap-verify-{name}-{tokens}tokens-{heads}heads", batch.format(tokens), latent(heads))
        for tokens in (2, 4)
        for heads in (16, 32, 64, 128)
        for name, batch in _BATCHES
    )
)

_LATENTS = named(
    *(
        (f"gap-decode-{name}-{heads}heads", batch, latent(heads))
        for heads, name, batch in (
            (16, "32x4k", "32q1s4k"),
            (16, "64x16k", "64q1s16k"),
            (32, "32x4k", "32q1s4k"),
            (64, "64x8k", "64q1s8k"),
            (128, "128x4k", "128q1s4k"),
        )
    )
)

_FEW_TILES = named(
    ("gap-prefill-256-over-100k", "q256s100000", {}),
    ("gap-prefill-4x64-over-30k", "4q64s30000", {}),
    ("gap-prefill-4x32-over-8k", "4q32s8k", {}),
    ("gap-prefill-512-over-60k", "q512s60000", {}),
)

_PREFILLS = named(
    *(
        (f"gap-prefill-1x{length}k-d{size}", f"q{length}k", {"head_size": size})
        for size in (136, 160, 192, 224)
        for length in (2, 6, 16)
    ),
    ("gap-prefill-1x10k-40heads", "q10k", {"num_heads": 40}),
    ("gap-prefill-1x16k-20heads", "q16k", {"num_heads": 20, "num_kv_heads": 4}),
)

_SHORT = named(
    *(
        (f"gap-decode-{count}x{length}", f"{count}q1s{length}", {})
        for count, length in ((200, "500"), (64, "300"), (512, "128"), (16, "1k"))
    )
)

_GROUPS = named(
    ("gap-decode-48x5k-28heads", "48q1s5k", {"num_heads": 28, "num_kv_heads": 4}),
    ("gap-decode-90x1500-40heads", "90q1s1500", {"num_heads": 40}),
    ("gap-decode-32x3k-d256", "32q1s3k", {"num_heads": 16, "head_size": 256}),
)

_CHUNKS = named(
    *((f"gap-prefill-{tokens}-over-30k", f"q{tokens}s30000", {}) for tokens in (512, 1024, 2048))
)

_STORED = named(
    *(
        (f"gap-decode-{count}x{length}", f"{count}q1s{length}", {})
        for count, length in ((32, "4k"), (64, "8k"), (8, "8k"), (256, "1k"))
    )
)
_INT8: dict[str, Any] = {"kv_cache_dtype": "int8_per_token_head"}
_INT8_INT4: dict[str, Any] = {**_INT8, "value_cache_dtype": "int4_per_group"}

_PROMPTS = named(*((f"gap-prefill-1x{length}k", f"q{length}k", {}) for length in (8, 16)))
_LONG = named(*((f"gap-decode-{count}x4k", f"{count}q1s4k", {}) for count in (16, 32)))

_MIXED = named(
    ("gap-mixed-16x4-over-4k-and-1k", "16q4s4k_q1k", {}),
    ("gap-mixed-60x3k-and-1000", "60q1s3k_q1000", {}),
    ("gap-mixed-30x4k-and-1k-d256", "30q1s4k_q1k", {"num_heads": 16, "head_size": 256}),
    ("gap-decode-24x10k-64heads", "24q1s10k", {"num_heads": 64, "num_kv_heads": 4}),
)

_DRAFTS = named(*((f"gap-verify-{count}x600", f"{count}q5s600", {}) for count in (32, 128)))

_INVARIANT = named(
    ("gap-decode-1x500", "q1s500", {}),
    ("gap-prefill-1x4k-d64", "q4k", {"num_heads": 64, "head_size": 64}),
    ("gap-decode-6x700", "6q1s700", {}),
    ("gap-prefill-6x700", "6q700", {}),
)

_OTHERS = named(
    ("gap-decode-200x2k-128heads", "200q1s2k", latent(128)),
    ("gap-decode-32x3k-d160", "32q1s3k", {"head_size": 160}),
)

_STREAMS = tuple(case for case in ENTRIES if "-decode-32x" in case.name)

_PARTS: tuple[_Part, ...] = (
    _against_peers(_VERIFY, 1.00),
    _against_own(_LATENTS, "e4m3", 0.62, kv_cache_dtype="fp8_e4m3"),
    _against_peers(_FEW_TILES, 0.98),
    _against_peers(_PREFILLS, 0.98),
    _against_own(_SHORT, "e4m3", 0.75, kv_cache_dtype="fp8_e4m3"),
    _rounded(_SHORT, 1.00),
    _rounded(_GROUPS, 1.00),
    _against_own(_CHUNKS, "e4m3", 1 / 0.97, kv_cache_dtype="fp8_e4m3"),
    *(_against_own(_LONG, name, 0.50, kv_cache_dtype=name) for name in ("nvfp4", "mxfp4")),
    _against_own(_STORED, "int8-rotated", 0.62, **_INT8, kv_rotation="hadamard"),
    _against_own(_STORED, "int8-int4-rotated", 0.52, **_INT8_INT4, kv_rotation="hadamard"),
    *(
        _against_own(_changed(cases, name, **stored), "rotated", limit, kv_rotation="hadamard")
        for cases, name, stored, limit in (
            (_STORED, "int8", _INT8, 1.03),
            (_PROMPTS, "int8", _INT8, 1.06),
            (_PROMPTS, "int8-int4", _INT8_INT4, 1.06),
        )
    ),
    _against_peers(_MIXED, 0.98),
    _against_peers(_DRAFTS, 1.00),
    (_STREAMS, {case.name: Target(share=0.70) for case in _STREAMS}),
    _against_own(_INVARIANT, "invariant", 1.15, batch_invariant=True),
    (_OTHERS, {}),
)

GAPS: _Rows = tuple({case.name: case for cases, _ in _PARTS for case in cases}.values())
"""The rows in the order of their targets, and the rows that they are compared with."""

GAP_TARGETS: Mapping[str, tuple[Target, ...]] = {
    case.name: found
    for case in GAPS
    if (found := tuple(targets[case.name] for _, targets in _PARTS if case.name in targets))
}
"""Name of a case -> what `triton` must reach on it."""
