"""K5: attention changes no byte of the cache (P8).

A step whose keys and values are in the cache runs `forward`, and all allocations of the cache are
compared with copies, unused bytes and blocks of no request included. A kernel that clears slots
past a sequence, stores dequantized elements or writes for a sharing layer fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.page_formats import PAGE_LAYOUT_NAMES
from attnlib.testing.runner import check_supported, run_materialized_case

__all__ = ["CHECKS"]

_CASES: dict[str, dict[str, object]] = {
    "decode": {"batch": "decode"},
    "mixed": {"batch": "mixed"},
    "padding": {"batch": "graph_padding"},
    "window": {"batch": "decode_long", "sliding_window": 9},
    "sharing": {"batch": "mixed", "kv_sharing": True},
    "fp8": {"batch": "mixed", "kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5},
    "selection": {"batch": "q1s90_q5s44_q2s2", "key_selection": ("kv_head", 16, 3, 1)},
    "pages": {
        "batch": "q1s37_q9s20",
        "kv_cache_dtype": "int8_per_token_head",
        "layout": PAGE_LAYOUT_NAMES[0],
    },
}


def _check(target: BackendUnderTest, case: Case) -> str:
    check_supported(target.backend, case, target.device)
    step = case.materialize(target.device)
    before = [storage.clone() for storage in step.inputs.cache.storage]
    run_materialized_case(target.backend, step)
    for old, new in zip(before, step.inputs.cache.storage, strict=True):
        changed = (old != new).nonzero().flatten()
        if len(changed):
            return (
                f"attention changed {len(changed)} bytes of the cache, first byte "
                f"{int(changed[0])} of {len(new)} (P8) | case: {case}"
            )
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, fields in _CASES.items():
        if target.base_case.use_mla and name == "pages":
            continue  # these formats store keys and values (M16)
        case = target.case(**fields)
        yield CheckCase(name, partial(_check, target, case), case)


CHECKS = (Check("K5", "attention changes no byte of the cache", _cases),)
