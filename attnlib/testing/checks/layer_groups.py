"""F2: layers of several kinds share one step.

A model may interleave layers with full attention and layers with a sliding window, or layers that
differ in soft cap, scale or number of KV heads. An engine builds the metadata once for each kind,
then runs the layers in turn. The metadata of one kind must stay valid while the builders and layers
of other kinds run, and must not affect the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import attend, check_supported, compare_with_oracle, make_impl

__all__ = ["CHECKS"]

_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full-and-window": ({}, {"sliding_window": 5}),
    "two-windows": ({"sliding_window": 3}, {"sliding_window": 19}),
    "full-and-chunks": ({}, {"attention_chunk_size": 8}),
    "two-soft-caps": ({"logits_soft_cap": 2.0}, {"logits_soft_cap": 30.0}),
    "two-scales": ({}, {"scale": 0.7}),
    "sinks-and-none": ({"sinks": True}, {}),
    "alibi-and-none": ({"alibi": True}, {}),
    "other-kv-heads": ({}, {"num_kv_heads": 1}),
    "bidirectional": ({}, {"mask": "bidirectional"}),
}
_QUICK = ("full-and-window", "two-soft-caps", "other-kv-heads")


def _check(target: BackendUnderTest, cases: list[Case], batches: tuple[str, ...]) -> str:
    for case in cases:
        check_supported(target.backend, case, target.device)
    builders = [target.backend.make_builder(case.spec, target.device) for case in cases]
    for batch in batches:
        layers = [case.replace(batch=batch) for case in cases]
        steps = [case.materialize(target.device, kv_written=False) for case in layers]
        common = steps[0].common()
        plans = [builder.build(0, common) for builder in builders]
        impls = [make_impl(target.backend, step) for step in steps]
        for impl, step, plan in zip(impls, steps, plans, strict=True):
            impl.write_kv(step.inputs.key, step.inputs.value, step.cache(), plan.slot_mapping)
        for turn in range(2):
            for index, (impl, step, plan) in enumerate(zip(impls, steps, plans, strict=True)):
                if error := compare_with_oracle(
                    layers[index], attend(impl, step, plan), target.device
                ):
                    return f"layer {index} of {len(layers)} interleaved kinds, pass {turn}: {error}"
    return ""


def _interleaved(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name in _QUICK if target.quick else _KINDS:
        cases = [target.case(batch="mixed", needs_lse=False, **kind) for kind in _KINDS[name]]
        last = cases[1] if _KINDS[name][1] else cases[0]
        yield CheckCase(
            name,
            partial(_check, target, cases, ("mixed", "decode")),
            last,
        )


CHECKS = (Check("F2", "interleaved layers of several kinds", _interleaved),)
