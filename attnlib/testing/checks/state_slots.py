"""ST6, ST10 to ST12: other slots, refusals, NaN, strides (T3, T5, T7, T8, T12, T14, T15)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from attnlib.errors import ContractError
from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.outcome import NotRun
from attnlib.testing.states.cases import ROLLBACK, over_kinds
from attnlib.testing.states.inputs import TokenInputs, draw_tokens, joined
from attnlib.testing.states.layers import (
    LayerUnderTest,
    compare_result_bits,
    compare_results,
    drawn,
    expected,
    part_of,
    to_cpu,
)
from attnlib.testing.states.serving import Results, Step

__all__ = ["CHECKS"]


def _other_slots(target: BackendUnderTest, spec: StateSpec) -> str:
    """Slots that a step does not name, and those of requests without tokens, keep every bit; so
    does a whole pool of one slot under padding."""
    for num_slots, step in (
        (5, Step([3, 1, 2, 0], [3, 6, 2, 8], [1, 0, -1, 3])),
        (1, Step([2, 0], [2, 0], [-1, -1])),
    ):
        layer = LayerUnderTest(target, spec, num_slots=num_slots, gap=256)
        before = to_cpu(layer.memory)
        layer.run(draw_tokens(spec, sum(step.query_lens), 1), step)
        after = to_cpu(layer.memory)
        written = [slot for slot, count in zip(step.slots, step.query_lens, strict=True) if count]
        for slot in range(num_slots):
            size = layer.cache.bytes_per_slot
            start = size if slot in written else 0
            if not torch.equal(before[slot, start:], after[slot, start:]):
                place = "bytes past its slot" if start else "it"
                return f"slot {slot} of {num_slots} changed: the step {step} does not name {place}"
    return ""


def _refusals(target: BackendUnderTest, spec: StateSpec) -> str:
    """With ATTNLIB_VALIDATE=1, a wrong slot or position is an error before anything is written."""
    layer = LayerUnderTest(target, spec)
    far = 5 - spec.max_rollback - 1  # slot 0 holds 5 tokens
    wrong = [
        ("T8", "a later position", Step([1], [9], [0])),
        ("T7", "a slot outside the pool", Step([1], [1], [5])),
        ("T7", "a source outside the pool", Step([1], [6], [1], [7])),
        ("T7", "a slot of two requests", Step([1, 1], [6, 6], [0, 0])),
        ("T12", "a source that is written", Step([1, 1], [6, 6], [0, 1], [0, 0])),
    ]
    if far > 0:
        wrong.append(("T8", "a position before the last step's drafts", Step([1], [far + 1], [0])))
    os.environ["ATTNLIB_VALIDATE"] = "1"
    try:
        for rule, what, step in wrong:
            tokens = draw_tokens(spec, sum(step.query_lens), 1)
            for name, part in (
                ("convolution", TokenInputs(tokens.x)),
                ("recurrence", replace(tokens, x=None)),
            ):
                message = _refused(layer, part, step, rule) if part.tensors() else ""
                if message:
                    return f"{name}: {what} {message}"
    finally:
        os.environ.pop("ATTNLIB_VALIDATE", None)
    return ""


def _refused(layer: LayerUnderTest, tokens: TokenInputs, step: Step, rule: str) -> str:
    """Whether one operation refuses a step; it must write nothing then."""
    before = to_cpu(layer.memory)
    try:
        layer.run(tokens, step)
    except ContractError as error:
        if error.rule != rule:
            return f"was refused by {error.rule or 'no rule'}, not {rule}: {error}"
    else:
        return f"was not refused ({rule})"
    if not torch.equal(before, to_cpu(layer.memory)):
        return "was refused after something was written"
    return ""


def _nan(target: BackendUnderTest, spec: StateSpec) -> str:
    """NaN in one request, in slots that were never used and in rows past the batch stays there."""
    first, second = drawn(spec, 9, target.seed), drawn(spec, 9, target.seed + 1)
    poisoned = draw_tokens(spec, 9, 5)
    for tensor in poisoned.tensors().values():
        tensor[4:] = torch.nan
    extra = draw_tokens(spec, 2, 6)
    for tensor in extra.tensors().values():
        tensor.fill_(torch.nan)
    layer = LayerUnderTest(target, spec, used=False)
    step = Step([9, 9, 9], [9, 9, 9], [0, 4, 2])
    got = layer.run(joined([first, poisoned, second, extra]), step)
    for name, tokens, start in (("before", first, 0), ("after", second, 18)):
        wanted = expected(spec, layer.tensors, tokens)
        rows = part_of(got, slice(start, start + 9))
        if message := compare_results(spec, rows, wanted, f"the request {name} one with NaN"):
            return message
    for what, result in zip(("convolution", "recurrence"), got, strict=True):
        if result is not None and not bool(result[13:18].isnan().flatten(1).any(1).all()):
            return f"{what}: rows with NaN inputs must be NaN, and they are not"
        if result is not None and bool(result[27:].any()):
            return f"{what}: rows past the batch must be 0 (T3)"
    return ""


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with other strides of all dimensions but the last, NaN in between."""
    wide = torch.full((tensor.shape[0], 2, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
    wide = wide.to(tensor.device)
    wide[:, 1] = tensor
    return wide[:, 1]


def _strides(target: BackendUnderTest, spec: StateSpec) -> str:
    """Strided inputs and slots far apart give the bits of dense ones."""
    tokens = drawn(spec, 21, target.seed)
    dense, apart = (LayerUnderTest(target, spec, gap=gap) for gap in (0, 4096 + 16))
    steps = ((0, 20, Step([20], [20], [3])), (20, 21, Step([1], [21], [3])))
    for first, end, step in steps:
        part = tokens.rows(first, end)
        strided = part.each(_strided)
        wanted, got = dense.run(part, step), apart.run(strided, step)
        if message := compare_result_bits(got, wanted, f"strided tensors, {end - first} tokens"):
            return message
    return _strided_outputs(dense, tokens.rows(20, 21))


def _strided_outputs(layer: LayerUnderTest, tokens: TokenInputs) -> str:
    """Outputs between other elements, which stay as they are."""
    step = Step([1], [1], [0])
    wanted = layer.run(tokens, step)
    inputs = tokens.each(lambda x: x.to(layer.device))
    for name, value, dense in (
        ("convolution", inputs.x, wanted.convolved),
        ("recurrence", inputs.value, wanted.out),
    ):
        if value is None or dense is None:
            continue
        wide = torch.full((1, 3, *value.shape[1:]), 7.0, dtype=value.dtype, device=layer.device)
        metadata = layer.metadata(step)
        if name == "convolution":
            layer.layer.convolve(value, layer.cache, metadata, output=wide[:, 1])
        else:
            assert inputs.query is not None and inputs.key is not None
            gates = inputs.log_decay, inputs.beta
            layer.layer(
                inputs.query, inputs.key, value, *gates, layer.cache, metadata, output=wide[:, 1]
            )
        if not bool((wide[:, ::2] == 7).all()):
            return f"{name}: elements beside a strided output changed"
        got = Results(wide[:, 1].cpu(), None)
        if message := compare_result_bits(got, Results(dense, None), f"strided {name}"):
            return message
    return ""


def _far_slots(target: BackendUnderTest, spec: StateSpec) -> str:
    """Slots past 2^31 elements (T7)."""
    if not target.on_gpu:
        raise NotRun("needs the memory of a GPU")
    near = LayerUnderTest(target, spec, num_slots=2)
    size = near.cache.bytes_per_slot
    far = LayerUnderTest(target, spec, num_slots=2, gap=(9 << 30) - size, used=False)
    tokens = drawn(spec, 20, target.seed)
    for first, end in ((0, 19), (19, 20)):
        step = Step([end - first], [end], [1])
        part = tokens.rows(first, end)
        if message := compare_result_bits(far.run(part, step), near.run(part, step), "slot 1"):
            return message
    return ""


_slot_cases, _nan_cases = (partial(over_kinds, body=body) for body in (_other_slots, _nan))
_refusal_cases = partial(
    over_kinds, body=_refusals, names=("gated delta", "short convolution"), rollback=ROLLBACK
)


def _stride_cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    yield from over_kinds(target, _strides)
    for each in over_kinds(target, _far_slots, names=("gated delta",)):
        yield CheckCase(f"far-{each.id}", each.run, state_spec=each.state_spec)


CHECKS = (
    Check("ST6", "states: other slots keep every bit", _slot_cases, kind="state"),
    Check("ST10", "states: wrong slots and positions are refused", _refusal_cases, kind="state"),
    Check("ST11", "states: NaN stays in its request", _nan_cases, kind="state"),
    Check("ST12", "states: strided tensors and slots", _stride_cases, kind="state"),
)
