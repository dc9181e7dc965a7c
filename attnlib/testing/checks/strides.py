"""K4: strided q, k, v and out are ordinary inputs, also the second time.

The same numbers run as views of a fused QKV tensor with a strided output and as packed tensors. Both must be within
budget, and a second call on the same objects must repeat the first bit by bit: a kernel that caches its launch by the
first call's strides fails there.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare_bits
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import attend, compare_with_oracle, make_impl

__all__ = ["CHECKS"]


def _check(target: BackendUnderTest, case: Case) -> str:
    builder = target.backend.make_builder(case.spec, target.device)
    strided, packed = (
        case.materialize(target.device),
        case.replace(contiguous=True).materialize(target.device),
    )
    impl = make_impl(target.backend, strided)
    metadata = builder.build(0, strided.common())
    first = attend(impl, strided, metadata)
    before = first.out.clone()
    for name, step in (("strided", strided), ("packed", packed)):
        seen = attend(impl, step, metadata)
        if wrong := compare_with_oracle(case, seen, target.device):
            return f"{name} tensors: {wrong}"
    if strided.inputs.query.stride() == packed.inputs.query.stride():
        return f"the case is vacuous: its query is not strided | case: {case}"
    repeated = compare_bits(attend(impl, strided, metadata).out, before)
    return (
        ""
        if repeated.passed
        else f"the second call on the same tensors differs: {repeated} | case: {case}"
    )


def _strides(target: BackendUnderTest) -> Iterator[CheckCase]:
    for batch in ("decode", "prefill", "mixed"):
        case = target.case(batch=batch)
        yield CheckCase(batch, lambda case=case: _check(target, case), case)  # type: ignore[misc]


CHECKS = (Check("K4", "strided inputs and outputs, twice in a row", _strides),)
