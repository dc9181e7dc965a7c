"""K4: strided q, k, v and out are ordinary inputs, also the second time.

The same numbers run as views of a fused QKV tensor with a strided output and as packed tensors. Both must be within
budget, and a second call on the same objects must repeat the first bit by bit: a kernel that caches its launch by the
first call's strides fails there.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnlib.testing.backend_under_test import Subject
from attnlib.testing.budget import compare_bits
from attnlib.testing.case import Case
from attnlib.testing.probe import Check, Probe
from attnlib.testing.runner import attend, judge, make_impl

__all__ = ["PROBES"]


def _check(subject: Subject, case: Case) -> str:
    builder = subject.backend.make_builder(case.spec, subject.device)
    strided, packed = case.step(subject.device), case.but(contiguous=True).step(subject.device)
    impl = make_impl(subject.backend, strided)
    metadata = builder.build(0, strided.common())
    first = attend(impl, strided, metadata)
    before = first.out.clone()
    for name, step in (("strided", strided), ("packed", packed)):
        seen = attend(impl, step, metadata)
        if wrong := judge(case, seen, subject.device):
            return f"{name} tensors: {wrong}"
    if strided.inputs.query.stride() == packed.inputs.query.stride():
        return f"the case is vacuous: its query is not strided | case: {case}"
    repeated = compare_bits(attend(impl, strided, metadata).out, before)
    return (
        ""
        if repeated.passed
        else f"the second call on the same tensors differs: {repeated} | case: {case}"
    )


def _strides(subject: Subject) -> Iterator[Check]:
    for batch in ("decode", "prefill", "mixed"):
        case = subject.case(batch=batch)
        yield Check(batch, lambda case=case: _check(subject, case), case)  # type: ignore[misc]


PROBES = (Probe("K4", "strided inputs and outputs, twice in a row", _strides),)
