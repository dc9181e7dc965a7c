"""The calls that pairs of backends are compared with: one writes the cache, the other one reads it.

Each call is named after what it exercises and states the rule of docs/paged-cache.md (P) or
docs/semantics.md (M) that a difference violates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.checks.latent import LATENT

__all__ = ["CALL_NAMES", "PairCase", "pair_cases"]


@dataclass(frozen=True)
class PairCase:
    """One call of a pair.

    Attributes:
        name: the name in reports and for `--only`.
        rule: the rule that a difference violates, with a word on its content.
        case: the configuration.
        captured_query_len: query tokens of each request of a captured step; 0 for a plain call.
    """

    name: str
    rule: str
    case: Case
    captured_query_len: int = 0


_CALLS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "decode": ("M1: positions", {"batch": "decode_long"}),
    "prefill": ("M1: positions", {"batch": "prefill"}),
    "chunked": ("M1: positions", {"batch": "chunked"}),
    "mixed": ("M1: positions", {"batch": "mixed"}),
    "page_edges": ("P3: block table", {"batch": "page_edges"}),
    "empty_rows": ("M7: empty requests", {"batch": "empty_rows"}),
    "padding": ("M7: padding rows", {"batch": "graph_padding"}),
    "window": ("M2: sliding window", {"sliding_window": 11}),
    "chunks": ("M2: attention chunks", {"attention_chunk_size": 24}),
    "soft_cap": ("M3: soft cap", {"logits_soft_cap": 2.0}),
    "alibi": ("M3: ALiBi", {"alibi": True}),
    "sinks": ("M4: sinks", {"sinks": True}),
    "lse": ("M5: LSE", {"needs_lse": True}),
    "lse_sinks": ("M4: sinks in the LSE", {"needs_lse": True, "sinks": True}),
    "HND": ("P2: layouts", {"batch": "ragged", "layout": "HND"}),
    "fp8": ("M9: scales", {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.125}),
}
_CAPTURED: Mapping[str, tuple[str, int]] = {
    "graph_decode": ("UNIFORM_SINGLE_TOKEN_DECODE", 1),
    "graph_verify": ("UNIFORM_BATCH", 4),
}
CALL_NAMES = (*_CALLS, "latent", *_CAPTURED)
"""The names of all calls, in order."""


def pair_cases(target: BackendUnderTest) -> Iterator[PairCase]:
    """The calls of a pair, in order; `target` is the writer with the reader as its partner."""
    latent = target.base_case.use_mla
    for name, (rule, changes) in _CALLS.items():
        changes = {"needs_lse": False, **changes}
        if latent:  # latents have one memory and one scale (P10)
            changes = {**changes, "v_scale": changes.get("k_scale", 1.0)}
        if not (latent and "layout" in changes):
            yield PairCase(name, rule, target.case(**changes))
    if not latent:
        case = target.case(**LATENT, batch="ragged", needs_lse=False)
        yield PairCase("latent", "M12: latents", case)
    for name, (level, query_len) in _CAPTURED.items():
        block = target.base_case.block_size
        lengths = (2 * block + 3, query_len, block, 5 * block)
        batch = "_".join(f"q{query_len}s{length}" for length in lengths)
        case = target.case(cudagraph=level, batch=batch, needs_lse=False, extra_columns=0)
        yield PairCase(name, "M7: padding rows of a graph", case, query_len)
