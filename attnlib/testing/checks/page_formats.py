"""Q4, Q5 and Q6: formats with scales in the page (M16).

Q4 compares whole pages with pages that integer arithmetic has filled, bit by bit. Q5 compares
attention with the oracle over the dequantized elements, which leaves the error of the kernel alone.
Q6 poisons scales: those that no query sees change no bit, and a visible NaN is not hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare_bits
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.layouts import write_slots
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.page_formats import PAGE_LAYOUT_NAMES, PAGE_NAMES, dequantize_tokens
from attnlib.testing.poison import poisoned_allocations
from attnlib.testing.runner import compare_with_oracle, make_impl, run_case, run_materialized_case

__all__ = [
    "CHECKS",
    "FEATURES",
    "check_attention",
    "check_unseen",
    "check_visible",
    "check_written",
    "page_case",
]

FEATURES: dict[str, dict[str, object]] = {
    "window+sinks": {"sliding_window": 9, "sinks": True},
    "soft_cap+alibi": {"logits_soft_cap": 5.0, "alibi": True},
    "bidirectional": {"mask": "bidirectional"},
    "tree": {"mask": "query_bias"},
    "per_request": {"mask": "per_request"},
    "chunk": {"attention_chunk_size": 24},
    "score": {"score": "attnlib.testing.score_functions:HEADS"},
}


_QUICK = dict(
    zip(PAGE_NAMES, ("mixed", "decode_long", "window+sinks", "mixed", "mixed"), strict=True)
)
"""The case of a format in the short form of Q5."""
_ROWS = ("int8_per_token_head", "int4_per_group")
"""Formats whose rows of bytes Q5 reads."""
_LARGEST = {"int8_per_token_head": 127, "fp8_per_token_head": 448}
"""The largest stored number of the formats whose scales can be as small as 2^-100."""


def page_case(target: BackendUnderTest, name: str, **changes: object) -> Case:
    """The base case with a format, or a pair; its head size is one that every format can store."""
    base = target.base_case
    size = base.head_size if base.head_size % 32 == 0 else 64
    keys, _, values = name.partition(",")
    fields: dict[str, object] = {
        "kv_cache_dtype": keys, "value_cache_dtype": values or None,
        "layout": PAGE_LAYOUT_NAMES[0], "head_size": size, **changes,
    }  # fmt: skip
    return target.case(**fields)


def check_written(target: BackendUnderTest, case: Case, kind: str = "") -> str:
    """Pages after a write, against pages that integer arithmetic has filled."""
    actual = case.materialize(target.device, kv_written=False)
    expected = case.materialize(target.device)
    limits = torch.finfo(case.torch_dtype)
    for step in (actual, expected) if kind else ():
        for new, sign in ((step.inputs.key, 1.0), (step.inputs.value, -1.0)):
            if kind == "largest":
                new.fill_(sign * limits.max)
            elif kind == "ties":  # with a scale of 1, midway between two 4-bit floats
                ties = torch.tensor((6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)).to(new)
                new.copy_(sign * ties.repeat(new.shape[-1] // 8 + 1)[: new.shape[-1]])
            elif kind == "smallest":
                new.fill_(sign * _LARGEST[case.kv_cache_dtype] * 2.0**-100)
            else:  # from one token to the next, twice as large
                new[:, :, 0] = 1.0
                steps = torch.arange(len(new), device=new.device)[:, None, None]
                new.clamp_(-1.0, 1.0).mul_(limits.tiny * 2.0**steps)
    if kind:
        expected = _rewritten(expected)
    impl = make_impl(target.backend, actual)
    impl.write_kv(
        actual.inputs.key, actual.inputs.value, actual.cache(), actual.inputs.slot_mapping
    )
    for pool, wanted in zip(
        actual.inputs.cache.storage, expected.inputs.cache.storage, strict=True
    ):
        differs = (pool != wanted).nonzero().flatten()
        if differs.numel():
            size = pool.numel() // actual.inputs.placement.num_blocks
            page, byte = divmod(int(differs[0]), size)
            return (
                f"{differs.numel()} bytes differ from the integer reference, first byte {byte} of "
                f"page {page}: {int(pool[differs[0]])} where {int(wanted[differs[0]])} was "
                f"expected (M16) | case: {case}"
            )
    if kind == "largest":
        assert expected.inputs.cache.scales is not None  # a case with scales in the page
        at = torch.tensor(expected.inputs.written_slots(), device=target.device)
        block, offset = at // case.block_size, at % case.block_size
        scale = expected.inputs.cache.scales[0]
        assert isinstance(scale, torch.Tensor)  # keys are not plain
        stored = (expected.inputs.cache.key, scale)
        raw = [view.view(torch.uint8) if view.element_size() == 1 else view for view in stored]
        elements, scales = (
            view[block, offset].view(like.dtype) for view, like in zip(raw, stored, strict=True)
        )
        if not bool(dequantize_tokens(elements, scales).isfinite().all()):
            return f"the largest numbers are not stored as finite ones (M16) | case: {case}"
    return ""


def _rewritten(step: MaterializedCase) -> MaterializedCase:
    """The step with its tokens stored again by the integer reference."""
    inputs = step.inputs
    assert inputs.cache.scales is not None  # a case with scales in the page
    slots = inputs.slot_mapping.tolist()
    rows = [row for row, slot in enumerate(slots) if slot >= 0]
    kept = [slots[row] for row in rows]
    write_slots(inputs.cache.key, kept, inputs.key[rows], inputs.cache.scales[0])
    write_slots(inputs.cache.value, kept, inputs.value[rows], inputs.cache.scales[1])
    return step


def _round_trip(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name in PAGE_NAMES:
        for layout in PAGE_LAYOUT_NAMES[:1] if target.quick else PAGE_LAYOUT_NAMES:
            short = target.quick or layout == PAGE_LAYOUT_NAMES[2]
            for batch in ("mixed",) if short else ("mixed", "graph_padding", "empty"):
                case = page_case(target, name, batch=batch, layout=layout)
                check = partial(check_written, target, case)
                yield CheckCase(f"written-{name}-{layout}-{batch}", check, case)
        case = page_case(target, name, batch="q3s20_q1s17")
        check = partial(check_written, target, case, "largest")
        yield CheckCase(f"saturated-{name}", check, case)
        yield CheckCase(f"ties-{name}", partial(check_written, target, case, "ties"), case)
        case = page_case(target, name, batch="q34")
        yield CheckCase(f"small-{name}", partial(check_written, target, case, "small"), case)
    for name in _LARGEST:
        case = page_case(target, name, batch="q3s20_q1s17")
        check = partial(check_written, target, case, "smallest")
        yield CheckCase(f"smallest-scale-{name}", check, case)


def check_attention(target: BackendUnderTest, case: Case) -> str:
    """The output against the oracle over the dequantized elements."""
    return compare_with_oracle(case, run_case(target.backend, case, target.device), target.device)


def _attention(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name in PAGE_NAMES:
        cases: dict[str, Case] = {
            batch: page_case(target, name, batch=batch)
            for batch in ("mixed", "decode_long", "chunked", "graph_padding")
        }
        cases["tokens-first"] = page_case(target, name, batch="mixed", layout=PAGE_LAYOUT_NAMES[1])
        if name in _ROWS:
            cases["rows"] = page_case(target, name, batch="mixed", layout=PAGE_LAYOUT_NAMES[2])
        for size in (64, 96, 128, 256) if name == "mxfp4" else (48, 80, 96, 128, 256):
            cases[f"head-{size}"] = page_case(target, name, batch="q7s20_q1s37", head_size=size)
        sizes = {"head_size": 64, "head_size_v": 32}
        cases["value-size"] = page_case(target, name, batch="q7s20_q1s37", **sizes)
        cases["block-17"] = page_case(target, name, batch="q3s40_q1s33", block_size=17)
        cases["float16"] = page_case(target, name, batch="q5s40_q1s33", dtype="float16")
        for feature, fields in FEATURES.items():
            cases[feature] = page_case(target, name, batch="q7s40_3q1s33", **fields)
        cases["empty"] = page_case(target, name, batch="empty")
        cases["no-keys"] = page_case(target, name, batch="q2s0_q1s3_q0s0")
        for label, case in cases.items():
            if not target.quick or label in (_QUICK[name], "empty"):
                yield CheckCase(f"{name}-{label}", partial(check_attention, target, case), case)


def check_unseen(target: BackendUnderTest, case: Case) -> str:
    """Elements and scales outside of all sequences change no bit (P5)."""
    clean = run_case(target.backend, case.replace(poison="zero"), target.device)
    with poisoned_allocations():
        poisoned = run_case(target.backend, case, target.device)
    found = compare_bits(poisoned.out, clean.out)
    return "" if found.passed else f"unused scales change the result: {found} | case: {case}"


def check_visible(target: BackendUnderTest, case: Case, which: str) -> str:
    """A NaN in a key or value makes the rows that see it NaN, and no others."""
    step = case.materialize(target.device, kv_written=False)
    new = step.inputs.key if which == "key" else step.inputs.value
    new[-1, 0, 3] = float("nan")  # the last token of the last request
    rows = run_materialized_case(target.backend, step).out
    group = case.num_heads // case.num_kv_heads
    poisoned = rows[-1, :group].isnan()
    if which == "key" and not bool(poisoned.all()):
        return f"a NaN in a key does not reach the rows that see it | case: {case}"
    if which == "value" and not bool(poisoned.any(-1).all()):
        return f"a NaN in a value does not reach the rows that see it | case: {case}"
    if bool(rows[:-1].isnan().any()) or bool(rows[-1, group:].isnan().any()):
        return f"a NaN in a {which} reaches rows that do not see it | case: {case}"
    return ""


def _poison(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name in PAGE_NAMES:
        for kind in ("nan",) if target.quick else ("nan", "inf", "huge"):
            batch = "q7s40_3q1s33" if target.quick else "mixed"
            case = page_case(target, name, batch=batch, poison=kind)
            yield CheckCase(f"unseen-{name}-{kind}", partial(check_unseen, target, case), case)
            if not target.quick:  # kernels for Hopper read 4-bit elements of these heads
                case = case.replace(batch="q2s40_3q1s33", head_size=128)
                check = partial(check_unseen, target, case)
                yield CheckCase(f"unseen-{name}-{kind}-head-128", check, case)
        for which in ("key",) if target.quick else ("key", "value"):
            case = page_case(target, name, batch="2q1s20", poison="zero")
            check = partial(check_visible, target, case, which)
            yield CheckCase(f"visible-{name}-{which}", check, case)


CHECKS = (
    Check("Q4", "pages with scales equal the integer reference bit by bit", _round_trip),
    Check("Q5", "attention over pages with scales is within the error budget", _attention),
    Check("Q6", "poisoned scales in pages", _poison),
)
