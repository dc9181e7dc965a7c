"""Q10: rotated heads and pairs of formats beside layers that have neither (P15, M16).

A layer over rotated heads computes what the same layer computes without the rotation. A cache of
two formats holds the bytes that caches of one format hold, and attention reads the numbers that
they stand for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from attnlib.ops.torch.hadamard import rotate_heads
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.checks.page_formats import page_case
from attnlib.testing.layouts import read_slots
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.page_formats import dequantize_tokens
from attnlib.testing.runner import attend, make_impl, write_then_attend

__all__ = ["CHECKS"]

_PAIRS = ("int8_per_token_head,int4_per_group", "int8_per_token_head,nvfp4")
_TOLERANCE = 8
"""Largest difference of two outputs, in units of the dtype's precision and of the largest one."""


def _check_heads(target: BackendUnderTest, case: Case) -> str:
    """The rotation alone has the bits of the reference, for numbers of every kind."""
    step = case.replace(kv_rotation=None).materialize(target.device)
    impl = make_impl(target.backend, step)  # the layer below the rotation
    heads = step.inputs.key[: case.batch_spec.num_actual_tokens].clone()
    for row, number in enumerate((float("nan"), float("inf"), 3e38, -3e38)):
        heads[row, 0, 3] = number
    for seed in (0, 3):
        for inverse in (False, True):
            given = heads.nan_to_num(0.0, 1.0, -1.0).clamp(-4.0, 4.0) if inverse else heads
            found = impl.rotate_heads(given, seed, inverse=inverse)
            wanted = rotate_heads(given, seed, inverse=inverse)
            if not torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)):
                return (
                    f"rotate_heads with seed {seed}, inverse={inverse} has other bits than the "
                    f"reference (P15) | case: {case}"
                )
    return ""


def _check_same(target: BackendUnderTest, case: Case) -> str:
    """A rotation that nothing is rounded behind changes no output."""
    found, wanted = (
        write_then_attend(target.backend, target.backend, one, target.device).out
        for one in (case, case.replace(kv_rotation=None))
    )
    return _difference(found, wanted, case, "the layer without a rotation")


def _check_bytes(target: BackendUnderTest, case: Case) -> str:
    """Each side of a pair is stored as in a cache of its format alone."""
    formats = (case.kv_cache_dtype, case.value_cache_dtype)
    pair = _written(target, case)
    for side, name in enumerate(formats):
        alone = _written(target, case.replace(kv_cache_dtype=name, value_cache_dtype=None))
        for found, wanted in zip(_stored(pair)[side], _stored(alone)[side], strict=True):
            if not torch.equal(found, wanted):
                which = ("keys", "values")[side]
                return (
                    f"the {which} of a cache of {formats[0]} and {formats[1]} have other bytes "
                    f"than in a cache of {name} (M16) | case: {case}"
                )
    return ""


def _written(target: BackendUnderTest, case: Case) -> MaterializedCase:
    step = case.materialize(target.device, kv_written=False)
    new = step.inputs
    make_impl(target.backend, step).write_kv(new.key, new.value, step.cache(), new.slot_mapping)
    return step


def _stored(step: MaterializedCase) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The elements and the scales of the written tokens, as bytes, of keys and of values."""
    slots = step.inputs.written_slots()
    return [
        (_bytes(read_slots(elements, slots)), _bytes(read_slots(scales, slots)))
        for elements, scales in _sides(step)
    ]


def _sides(step: MaterializedCase) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Elements and scales of the keys and of the values in the cache."""
    views = step.inputs.cache
    assert views.scales is not None  # the formats have scales in the page
    k_scale, v_scale = views.scales
    assert isinstance(k_scale, torch.Tensor) and isinstance(v_scale, torch.Tensor)
    return [(views.key, k_scale), (views.value, v_scale)]


def _bytes(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.contiguous().view(torch.uint8)


def _check_numbers(target: BackendUnderTest, case: Case) -> str:
    """Attention over a pair is attention over the numbers that its bytes stand for."""
    step = case.materialize(target.device)
    plain_case = case.replace(kv_cache_dtype="auto", value_cache_dtype=None, layout="NHD")
    plain = plain_case.materialize(target.device)
    views = plain.inputs.cache.key, plain.inputs.cache.value
    for (elements, scales), numbers in zip(_sides(step), views, strict=True):
        numbers.copy_(dequantize_tokens(elements, scales).to(numbers.dtype))
    found, wanted = (_attended(target, one) for one in (step, plain))
    return _difference(found, wanted, case, "a cache of the same numbers")


def _attended(target: BackendUnderTest, step: MaterializedCase) -> torch.Tensor:
    metadata = target.backend.make_builder(step.spec, target.device).build(0, step.common())
    return attend(make_impl(target.backend, step), step, metadata).out


def _difference(found: torch.Tensor, wanted: torch.Tensor, case: Case, other: str) -> str:
    rows = case.batch_spec.num_actual_tokens
    found, wanted = found[:rows].double(), wanted[:rows].double()
    limit = _TOLERANCE * torch.finfo(case.torch_dtype).eps * float(wanted.abs().max())
    error = float((found - wanted).abs().max())
    if error <= limit:
        return ""
    return f"outputs differ by {error:.1e} (allowed {limit:.1e}) from {other} | case: {case}"


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    batch = "q7s20_q1s37"
    fields: dict[str, object]
    for size in (64, 80):
        case = target.case(batch=batch, head_size=size, kv_rotation="hadamard", dtype="float32")
        yield CheckCase(f"heads-{size}", partial(_check_heads, target, case), case)
    for name in ("hadamard", "hadamard_values@3"):
        # Without a context, whose keys a case draws as they are stored.
        fields = {"batch": "q7_q20", "head_size": 64, "kv_rotation": name, "dtype": "float32"}
        case = target.case(**fields)
        yield CheckCase(f"same-{name}", partial(_check_same, target, case), case)
    for pair in _PAIRS[:1] if target.quick else _PAIRS:
        fields = {"batch": batch, "dtype": "float32", "poison": "zero"}
        case = page_case(target, pair, **fields)
        yield CheckCase(f"bytes-{pair}", partial(_check_bytes, target, case), case)
        yield CheckCase(f"numbers-{pair}", partial(_check_numbers, target, case), case)


CHECKS = (Check("Q10", "rotated heads and pairs of formats beside plain layers", _cases),)
