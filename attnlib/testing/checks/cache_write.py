"""K3 and Q3: cache writes.

The check compares the whole allocation, including unused bytes, with a reference write. Slot -1
writes nothing. The length of `slot_mapping`, not of the key, gives the number of tokens to write
(P4). Writes to fp8 caches saturate (M9).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.layouts import CACHE_LAYOUTS, read_slots
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.runner import make_impl

__all__ = ["CHECKS", "compare_storage"]


def compare_storage(actual: MaterializedCase, expected: MaterializedCase) -> str:
    """Compare the caches of two steps; "" if they are equal.

    Elements of fp8 caches may differ by one step of the format (rounding ties).
    """
    for name, actual_view, expected_view in (
        ("key", actual.inputs.cache.key, expected.inputs.cache.key),
        ("value", actual.inputs.cache.value, expected.inputs.cache.value),
    ):
        differs = _different(actual_view, expected_view)
        if differs.any():
            slots = torch.nonzero(differs.flatten()).flatten().tolist()
            written = set(expected.inputs.written_slots())
            unexpected = [slot for slot in slots if slot not in written]
            if unexpected:
                return (
                    f"{name}_cache changed at slot {unexpected[0]}, which is not in slot_mapping "
                    f"({len(unexpected)} such slots)"
                )
            return (
                f"{name}_cache is wrong at slot {slots[0]} ({len(slots)} of {len(written)} written "
                "slots)"
            )
    return ""


def _different(actual_view: torch.Tensor, expected_view: torch.Tensor) -> torch.Tensor:
    """[B, N] bool, True where slots differ. NaN equals NaN; fp8 elements may differ by one step."""
    a, b = actual_view.float(), expected_view.float()
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    if actual_view.element_size() == 1:
        bits_a, bits_b = actual_view.view(torch.uint8).int(), expected_view.view(torch.uint8).int()
        same |= ((bits_a - bits_b).abs() <= 1) & torch.isfinite(a) & torch.isfinite(b)
    return ~same.all(dim=3).all(dim=2)


def _write(target: BackendUnderTest, step: MaterializedCase, slot_mapping: torch.Tensor) -> None:
    impl = make_impl(target.backend, step)
    impl.write_kv(step.inputs.key, step.inputs.value, step.cache(), slot_mapping)


def _check_written(target: BackendUnderTest, case: Case) -> str:
    actual, expected = (
        case.materialize(target.device, kv_written=False),
        case.materialize(target.device),
    )
    _write(target, actual, actual.inputs.slot_mapping)
    error = compare_storage(actual, expected)
    return f"{error} | case: {case}" if error else ""


def _check_skipped(target: BackendUnderTest, case: Case, keep: str) -> str:
    """Replace some or all slots by -1, or pass a mapping that is shorter than the key."""
    actual, expected = (
        case.materialize(target.device, kv_written=False),
        case.materialize(target.device),
    )
    slots = actual.inputs.slot_mapping.clone()
    kept = torch.zeros_like(slots, dtype=torch.bool)
    if keep == "every-second":
        kept[::2] = True
    elif keep == "first-half":
        kept[: len(slots) // 2] = True
    skipped = [
        slot
        for slot, stays in zip(slots.tolist(), kept.tolist(), strict=True)
        if not stays and slot >= 0
    ]
    mapping = slots[: len(slots) // 2] if keep == "first-half" else slots.masked_fill(~kept, -1)
    before = [
        read_slots(view, skipped).clone()
        for view in (actual.inputs.cache.key, actual.inputs.cache.value)
    ]
    _write(target, actual, mapping)
    for name, view, old in zip(
        ("key", "value"), (actual.inputs.cache.key, actual.inputs.cache.value), before, strict=True
    ):
        now = read_slots(view, skipped)
        if not torch.equal(now.contiguous().view(torch.uint8), old.contiguous().view(torch.uint8)):
            return (
                f"{name}_cache was written for slot -1 or past the end of slot_mapping (P4) "
                f"| case: {case}"
            )
    block_size = case.block_size
    for actual_view, expected_view in (
        (actual.inputs.cache.key, expected.inputs.cache.key),
        (actual.inputs.cache.value, expected.inputs.cache.value),
    ):
        if skipped:
            at = torch.tensor(skipped, device=actual_view.device)
            _raw(actual_view)[at // block_size, at % block_size] = _raw(expected_view)[
                at // block_size, at % block_size
            ]
    error = compare_storage(actual, expected)
    return f"{error} | case: {case}" if error else ""


def _raw(view: torch.Tensor) -> torch.Tensor:
    return view.view(torch.uint8) if view.element_size() == 1 else view


def _check_saturates(target: BackendUnderTest, case: Case) -> str:
    step = case.materialize(target.device, kv_written=False)
    step.inputs.key.fill_(torch.finfo(case.torch_dtype).max)
    step.inputs.value.fill_(-torch.finfo(case.torch_dtype).max)
    _write(target, step, step.inputs.slot_mapping)
    limit = torch.finfo(case.dimensions.cache_dtype).max
    slots = step.inputs.written_slots()
    keys, values = (
        read_slots(view, slots).float() for view in (step.inputs.cache.key, step.inputs.cache.value)
    )
    if not (keys == limit).all() or not (values == -limit).all():
        return (
            f"values outside the format must saturate at {limit} (M9), actual "
            f"{float(keys.flatten()[0])} | case: {case}"
        )
    return ""


def _check_empty_pool(target: BackendUnderTest, case: Case) -> str:
    """A pool without blocks takes tokens without slots, as those of a padded step."""
    step = case.materialize(target.device, kv_written=False)
    views = (step.inputs.cache.key[:0], step.inputs.cache.value[:0])
    slots = torch.full_like(step.inputs.slot_mapping, -1)
    pool = PagedKVCache.from_views(*views)
    make_impl(target.backend, step).write_kv(step.inputs.key, step.inputs.value, pool, slots)
    return ""


def _slots(target: BackendUnderTest) -> Iterator[CheckCase]:
    for batch in ("mixed", "graph_padding", "page_edges", "empty", "only_padding"):
        case = target.case(batch=batch)
        yield CheckCase(f"written-{batch}", partial(_check_written, target, case), case)
    for layout in CACHE_LAYOUTS:
        case = target.case(batch="ragged", layout=layout)
        yield CheckCase(f"written-{layout}", partial(_check_written, target, case), case)
    case = target.case(batch="mixed")
    yield CheckCase("no-blocks", partial(_check_empty_pool, target, case), case)
    for keep in ("every-second", "none", "first-half"):
        case = target.case(batch="mixed")
        yield CheckCase(
            f"skipped-{keep}",
            partial(_check_skipped, target, case, keep),
            case,
        )


def _saturation(target: BackendUnderTest) -> Iterator[CheckCase]:
    for stored in ("fp8_e4m3", "fp8_e5m2"):
        case = target.case(batch="q3s20_q1s17", kv_cache_dtype=stored, k_scale=0.5, v_scale=0.25)
        yield CheckCase(stored, partial(_check_saturates, target, case), case)
        for kind in ("tensor", "head"):
            scaled = case.replace(kv_scale_kind=kind, k_scale=0.0625, v_scale=0.03125)
            yield CheckCase(
                f"written-{stored}-{kind}",
                partial(_check_written, target, scaled),
                scaled,
            )


CHECKS = (
    Check("K3", "cache writes change only their slots", _slots),
    Check("Q3", "fp8 cache writes scale and saturate", _saturation),
)
