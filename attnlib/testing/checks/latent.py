"""A1: attention over latent caches (multi-head latent attention), P10 and M12.

The values are the first Dv elements of the keys, in the same memory, and all query heads share the
one KV head. The softmax scale is that of the heads before absorption, not that of the latent. A
backend that places the rotary part elsewhere, or derives the scale from the latent's width, gives
other results than the oracle. The cache write is compared over the whole allocation.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.checks.cache_write import compare_storage
from attnlib.testing.runner import check_supported, compare_with_oracle, make_impl, run_case

__all__ = ["CHECKS", "LATENT"]

LATENT: dict[str, object] = {
    "use_mla": True,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_size": 96,
    "head_size_v": 64,
    "layout": "ALIASED",
}
"""Fields of a small layer over latents."""

_DEEPSEEK: dict[str, object] = {
    **LATENT, "head_size": 576, "head_size_v": 512, "block_size": 64, "scale": 192**-0.5,
}  # fmt: skip
_SIZES: dict[str, dict[str, object]] = {
    "16-heads": {**_DEEPSEEK, "num_heads": 16},
    "128-heads": {**_DEEPSEEK, "num_heads": 128},
    "5-heads-page-16": {**_DEEPSEEK, "num_heads": 5, "block_size": 16},
    "no-rotary-part": {"head_size": 64, "head_size_v": 64},
    "unequal-parts": {"head_size": 72, "head_size_v": 40},
}
_BATCHES = {
    "decode": "decode",
    "splits": "decode_long",
    "verify": "q4s40_q2s33_q3s17_q8s70",
    "prefill": "q40_q17",
    "chunked": "chunked",
    "mixed": "ragged",
    "padding": "graph_padding",
}
_FEATURES: dict[str, dict[str, object]] = {
    "scale": {"scale": 0.3},
    "window": {"sliding_window": 9},
    "sinks": {"sinks": True},
    "soft_cap": {"logits_soft_cap": 3.0},
    "lse": {"needs_lse": True},
    "window+sinks+lse": {"sliding_window": 20, "sinks": True, "needs_lse": True},
    "tree": {"mask": "query_bias"},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.125, "v_scale": 0.125},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2", "k_scale": 0.25, "v_scale": 0.25},
}
_QUICK_BATCHES = ("splits", "verify", "chunked")
_QUICK_FEATURES = ("scale", "fp8_e4m3", "window+sinks+lse")
_QUICK_SIZES = ("16-heads", "unequal-parts")


def _case(target: BackendUnderTest, name: str, **fields: object) -> CheckCase:
    case = target.case(**{**LATENT, **fields})

    def run() -> str:
        output = run_case(target.backend, case, target.device)
        return compare_with_oracle(case, output, target.device)

    return CheckCase(name, run, case)


def _check_written(target: BackendUnderTest, case: Case) -> str:
    check_supported(target.backend, case, target.device)
    actual = case.materialize(target.device, kv_written=False)
    inputs = actual.inputs
    make_impl(target.backend, actual).write_kv(
        inputs.key, inputs.value, actual.cache(), inputs.slot_mapping
    )
    error = compare_storage(actual, case.materialize(target.device))
    return f"{error} | case: {case}" if error else ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, batch in _BATCHES.items():
        if not target.quick or name in _QUICK_BATCHES:
            yield _case(target, name, batch=batch)
    for name, fields in _FEATURES.items():
        for phase in ("splits", "mixed"):
            if not target.quick or (name in _QUICK_FEATURES and phase == "mixed"):
                yield _case(target, f"{name}-{phase}", batch=_BATCHES[phase], **fields)
    for name, fields in _SIZES.items():
        if not target.quick or name in _QUICK_SIZES:
            yield _case(target, name, batch="q1s33_q3s40_q12s20", **fields)
    for dtype in ("float16", "bfloat16"):
        if not target.quick:
            yield _case(target, dtype, batch=_BATCHES["mixed"], dtype=dtype)
    for stored, scale in (("auto", 1.0), ("fp8_e4m3", 0.125)):
        case = target.case(
            **LATENT, batch="mixed", kv_cache_dtype=stored, k_scale=scale, v_scale=scale
        )
        yield CheckCase(f"written-{stored}", partial(_check_written, target, case), case)


CHECKS = (Check("A1", "latent caches: values that are a prefix of the keys", _cases),)
