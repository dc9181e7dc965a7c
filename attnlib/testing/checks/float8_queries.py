"""S5: prefills that round queries and weights to e4m3 stay within the error of that rounding (M19).

The output may differ from the oracle by the error of queries and weights with 4 significant bits. A
backend that computes exactly passes, one that drops a scale or accumulates in too few bits does
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import FLOAT8_QUERY_ERROR, relative_error
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import check_supported, run_materialized_case

__all__ = ["CHECKS"]

_BATCHES = {"few": "q70s400_q33s200", "long": "q4500", "two": "q4200s4600_q300s900"}
"""Kernels may round the queries of long prompts only. Those are too slow to check on a CPU."""
_FEATURES: dict[str, dict[str, object]] = {
    "scales": {"k_scale": 0.25, "v_scale": 0.5},
    "head-scales": {"kv_scale_kind": "head", "k_scale": 0.25, "v_scale": 0.5},
    "window": {"sliding_window": 700},
    "float16": {"dtype": "float16"},
    "page-128": {"block_size": 128},
    "mqa": {"num_heads": 8, "num_kv_heads": 1},
}
_MOST_LSE_ERROR = 0.05
"""Bound of the largest error of a LSE."""


def _check(target: BackendUnderTest, case: Case) -> str:
    check_supported(target.backend, case, target.device)
    step = case.materialize(target.device)
    output = run_materialized_case(target.backend, step)
    expected = step.oracle()
    errors = []
    error = relative_error(output.out, expected.out)
    if not error < FLOAT8_QUERY_ERROR:
        errors.append(f"relative error of the output {error:.3g}, at most {FLOAT8_QUERY_ERROR}")
    if output.lse is not None:
        finite = expected.lse.isfinite()
        off = (output.lse.double() - expected.lse)[finite].abs().max()
        if not off < _MOST_LSE_ERROR:
            errors.append(f"error of the LSE {off:.3g}, at most {_MOST_LSE_ERROR}")
    return f"{'; '.join(errors)} | case: {case}" if errors else ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    base: dict[str, object] = {
        "num_heads": 4, "num_kv_heads": 1, "head_size": 128, "dtype": "bfloat16",
        "kv_cache_dtype": "fp8_e4m3", "allow_fp8_queries": True, "needs_lse": True,
    }  # fmt: skip
    on_cpu = target.device.type == "cpu"
    for name, batch in _BATCHES.items():
        if name == ("few" if on_cpu else "two") or not (target.quick or on_cpu):
            case = target.case(**base | {"batch": batch})
            yield CheckCase(name, partial(_check, target, case), case)
    for feature, changes in _FEATURES.items():
        if not target.quick:
            batch = _BATCHES["few" if on_cpu else "two"]
            case = target.case(**base | {"batch": batch} | changes)
            yield CheckCase(feature, partial(_check, target, case), case)


CHECKS = (Check("S5", "float8 queries within the error of rounding", _cases),)
