"""K4: strided q, k, v and out tensors, with repeated calls.

The same numbers run as views of a fused QKV tensor with a strided output, and as contiguous
tensors. Both results must be within budget. A repeated call with the same tensors must give the
same bits: a kernel that caches the strides of its first call fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

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
        output = attend(impl, step, metadata)
        if error := compare_with_oracle(case, output, target.device):
            return f"{name} tensors: {error}"
    if strided.inputs.query.stride() == packed.inputs.query.stride():
        return f"invalid case: the query is contiguous | case: {case}"
    repeated = compare_bits(attend(impl, strided, metadata).out, before)
    return (
        ""
        if repeated.passed
        else f"the second call on the same tensors differs: {repeated} | case: {case}"
    )


def _strides(target: BackendUnderTest) -> Iterator[CheckCase]:
    for batch in ("decode", "prefill", "mixed"):
        case = target.case(batch=batch)
        yield CheckCase(batch, partial(_check, target, case), case)
        wide = case.replace(hidden_columns=7)  # the row stride of the table is not its width
        yield CheckCase(f"{batch}-wide_table", partial(_check, target, wide), wide)


CHECKS = (Check("K4", "strided inputs and outputs, repeated calls", _strides),)
