"""N1: the contents of unused memory must not affect the result.

The same case runs with zeros and with poison (NaN, infinity or the largest finite number) in cache
elements outside all sequences, padding rows of q, k and v, output buffers, block table entries past
the blocks of a request, and memory that the backend allocates without initializing it. The results
must have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare_bits
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.outcome import UnsupportedCase
from attnlib.testing.poison import poisoned_allocations
from attnlib.testing.runner import run_case

__all__ = ["CHECKS"]

_FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "sinks": {"sinks": True},
    "bidirectional": {"mask": "bidirectional"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5},
}


def _check(target: BackendUnderTest, case: Case) -> str:
    if target.backend.capabilities.needs_finite_cache and case.poison != "huge":
        raise UnsupportedCase(
            ["needs_finite_cache=True: unused cache elements must be finite (P5)"]
        )
    clean = run_case(target.backend, case.replace(poison="zero"), target.device)
    with poisoned_allocations():
        poisoned = run_case(target.backend, case, target.device)
    comparisons = [compare_bits(poisoned.out, clean.out, "out")]
    if poisoned.lse is not None and clean.lse is not None:
        comparisons.append(compare_bits(poisoned.lse, clean.lse, "lse"))
    errors = [str(comparison) for comparison in comparisons if not comparison.passed]
    return (
        f"{case.poison} in unused memory changes the result: {'; '.join(errors)} | case: {case}"
        if errors
        else ""
    )


def _cases(target: BackendUnderTest) -> Iterator[tuple[str, Case]]:
    for kind in ("nan", "huge") if target.quick else ("nan", "inf", "huge"):
        for batch in (
            ("mixed", "page_edges")
            if target.quick
            else ("mixed", "page_edges", "decode_long", "empty_rows")
        ):
            yield f"{kind}-{batch}", target.case(batch=batch, poison=kind)
    for name, features in _FEATURES.items():
        if name != "plain" and not (target.quick and name in ("sinks", "fp8")):
            yield (
                f"nan-{name}",
                target.case(batch="mixed", poison=target.base_case.poison, **features),
            )
    for layout in ("NHD_PACKED", "HND"):
        yield f"nan-{layout}", target.case(batch="page_edges", layout=layout)
    # Tails of requests of several splits, of unequal lengths.
    long = "q1s2405_q1s2390_2q1s1999"
    yield "nan-long-decode", target.case(batch=long)
    yield "nan-long-window", target.case(batch=long, sliding_window=2200)
    yield "table-minus-one", target.case(batch="ragged", garbage="minus_one", extra_columns=3)
    yield "padding-rows", target.case(batch="graph_padding")


def _poison(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, case in _cases(target):
        yield CheckCase(name, partial(_check, target, case), case)


CHECKS = (Check("N1", "unused memory does not affect the result", _poison),)
