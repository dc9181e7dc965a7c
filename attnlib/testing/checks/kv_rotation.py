"""Q8: caches of rotated heads (P15).

The whole cache is compared with heads that this package's reference has rotated and stored, bit by
bit. Attention is compared with the oracle over the stored numbers: rotated queries, and outputs
that are rotated back.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.checks.cache_write import compare_storage
from attnlib.testing.page_formats import PAGE_LAYOUT_NAMES, PAGE_NAMES
from attnlib.testing.runner import (
    compare_with_oracle,
    equals_result_without,
    expected_results,
    make_impl,
    run_case,
)

__all__ = ["CHECKS"]

_FP8: dict[str, object] = {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.05, "v_scale": 0.05}
_FEATURES: dict[str, dict[str, object]] = {
    "window+sinks": {"sliding_window": 9, "sinks": True},
    "soft_cap+alibi": {"logits_soft_cap": 5.0, "alibi": True},
    "tree": {"mask": "query_bias"},
    "bidirectional": {"mask": "bidirectional"},
    "score": {"score": "attnlib.testing.score_functions:HEADS"},
    "sharing": {"kv_sharing": True},
    "keys-only": {"kv_rotation": "hadamard_keys"},
    "values-only": {"kv_rotation": "hadamard_values@3"},
    "head-80": {"head_size": 80},
    "value-size": {"head_size": 64, "head_size_v": 96},
    "float16": {"dtype": "float16"},
}


def _case(target: BackendUnderTest, name: str, **changes: object) -> Case:
    """The base case with a rotation and a stored format; "plain" is that of the model."""
    base = target.base_case
    fields: dict[str, object] = {
        "kv_rotation": "hadamard",
        "head_size": base.head_size if base.head_size % 32 == 0 else 64,
    }
    if name == "fp8_e4m3":
        fields |= _FP8
    elif name != "plain":
        fields |= {"kv_cache_dtype": name, "layout": PAGE_LAYOUT_NAMES[0]}
    return target.case(**{**fields, **changes})


def _check_written(target: BackendUnderTest, case: Case) -> str:
    """The cache after a write, against heads that the reference has rotated."""
    actual = case.materialize(target.device, kv_written=False)
    inputs = actual.inputs
    impl = make_impl(target.backend, actual)
    impl.write_kv(inputs.key, inputs.value, actual.cache(), inputs.slot_mapping)
    error = compare_storage(actual, case.materialize(target.device))
    return f"{error} (P15) | case: {case}" if error else ""


def _check_attention(target: BackendUnderTest, case: Case) -> str:
    """The output, which differs from what no rotation would give over the same cache."""
    actual = run_case(target.backend, case, target.device)
    if error := compare_with_oracle(case, actual, target.device):
        return error
    without = case.replace(kv_rotation=None)
    with_it, without_it = (expected_results(one, str(target.device)) for one in (case, without))
    if equals_result_without(actual, with_it, without_it, case.torch_dtype):
        return f"the rotation is ignored (P15) | case: {case}"
    return ""


def _check_nan(target: BackendUnderTest, case: Case) -> str:
    """A NaN in a head is visible, and infinities and large numbers stay finite."""
    for found, is_finite in ((float("nan"), False), (float("inf"), True), (3e38, True)):
        step = case.materialize(target.device, kv_written=False)
        for new in (step.inputs.key, step.inputs.value):
            new[-1, 0, 3] = new[-1, 0, 5] = found
        impl = make_impl(target.backend, step)
        metadata = target.backend.make_builder(case.spec, target.device).build(0, step.common())
        impl.write_kv(step.inputs.key, step.inputs.value, step.cache(), step.inputs.slot_mapping)
        step.inputs.query.mul_(0.0)  # finite scores, whatever the keys are
        impl.forward(step.inputs.query, step.cache(), metadata, step.inputs.out)
        group = case.num_heads // case.num_kv_heads
        last = step.inputs.out[-1, :group]
        if bool(last.isfinite().all()) != is_finite or bool(step.inputs.out[:-1].isnan().any()):
            return f"{found} in a key and a value gives {last[0, :4].tolist()} | case: {case}"
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    names = ("plain", "fp8_e4m3", *PAGE_NAMES)
    for name in names[1:3] if target.quick else names:
        case = _case(target, name, batch="q7s20_q1s37")
        yield CheckCase(f"written-{name}", partial(_check_written, target, case), case)
        yield CheckCase(f"mixed-{name}", partial(_check_attention, target, case), case)
    first = PAGE_NAMES[0]
    cases = {
        batch: _case(target, first, batch=batch)
        for batch in ("decode_long", "graph_padding", "empty")
    }
    cases["no-keys"] = _case(target, first, batch="q2s0_q1s3_q0s0")
    cases["invariant"] = _case(target, "fp8_e4m3", batch="mixed", batch_invariant=True)
    for feature, fields in _FEATURES.items():
        cases[feature] = _case(target, first, batch="q7s40_3q1s33", **fields)
    quick = ("graph_padding", "values-only", "value-size", "head-80")
    for label, case in cases.items():
        if not target.quick or label in quick:
            yield CheckCase(label, partial(_check_attention, target, case), case)
    case = _case(target, first, batch="2q1s20", poison="zero", dtype="float32")
    yield CheckCase("nan", partial(_check_nan, target, case), case)


CHECKS = (Check("Q8", "rotated keys and values", _cases),)
