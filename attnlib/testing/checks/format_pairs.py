"""Q9: keys and values in two formats, of which one may be the dtype of the model (M16)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.checks.page_formats import (
    FEATURES,
    check_attention,
    check_unseen,
    check_written,
    page_case,
)
from attnlib.testing.page_formats import PAGE_LAYOUT_NAMES, PAGE_NAMES

__all__ = ["CHECKS"]

_PAIRS = ("int8_per_token_head,int4_per_group", "int8_per_token_head,nvfp4")


def _plain_sides(target: BackendUnderTest) -> list[str]:
    """Pairs with one side in the dtype of the model."""
    plain = target.base_case.dtype
    return [pair for name in PAGE_NAMES for pair in (f"auto,{name}", f"{name},{plain}")]


def _attention_cases(target: BackendUnderTest) -> dict[str, Case]:
    cases = {}
    for name in _PAIRS:
        cases[name] = page_case(target, name, batch="mixed")
        rotated = {"batch": "q7s20_q1s37", "kv_rotation": "hadamard"}
        cases[f"{name}-rotated"] = page_case(target, name, **rotated)
    first, last = _PAIRS[0], _PAIRS[-1]
    cases[f"{first}-decode_long"] = page_case(target, first, batch="decode_long")
    cases[f"{last}-decode_long"] = page_case(target, last, batch="decode_long")
    sizes = {"head_size": 80, "head_size_v": 48}
    cases[f"{first}-value-size"] = page_case(target, first, batch="q7s20_q1s37", **sizes)
    sizes = {"head_size": 48, "head_size_v": 80}
    cases[f"{last}-value-size"] = page_case(target, last, batch="q7s20_q1s37", **sizes)
    for name in _PAIRS:
        wide = {"head_size": 128, "dtype": "float16"}  # kernels for Hopper read these
        cases[f"{name}-head-128"] = page_case(target, name, batch="q1s70_2q2s40_q1s33", **wide)
        fields = {**wide, **FEATURES["window+sinks"]}
        cases[f"{name}-head-128-window+sinks"] = page_case(target, name, batch="3q1s70", **fields)
    cases[f"{first}-float16"] = page_case(target, first, batch="q5s40_q1s33", dtype="float16")
    tokens_first = {"batch": "q5s40_q1s33", "layout": PAGE_LAYOUT_NAMES[1]}
    cases[f"{last}-tokens-first"] = page_case(target, last, **tokens_first)
    for feature in ("window+sinks", "score"):
        fields = FEATURES[feature]
        cases[f"{first}-{feature}"] = page_case(target, first, batch="q7s40_3q1s33", **fields)
    for name in _plain_sides(target):
        cases[name] = page_case(target, name, batch="mixed")
    return cases


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    first, last = _PAIRS[0], _PAIRS[-1]
    for name in (first,) if target.quick else (*_PAIRS, *_plain_sides(target)):
        case = page_case(target, name, batch="mixed")
        yield CheckCase(f"written-{name}", partial(check_written, target, case), case)
    for label, case in _attention_cases(target).items():
        if not target.quick or label in (f"{first}-rotated", f"{last}-value-size"):
            yield CheckCase(label, partial(check_attention, target, case), case)
    for name in () if target.quick else _PAIRS:
        case = page_case(target, name, batch="q7s40_3q1s33", poison="nan")
        yield CheckCase(f"unseen-{name}", partial(check_unseen, target, case), case)
        case = case.replace(batch="q2s40_3q1s33", head_size=128, dtype="float16")
        yield CheckCase(f"unseen-{name}-head-128", partial(check_unseen, target, case), case)


CHECKS = (Check("Q9", "keys and values in two formats", _cases),)
