"""K4: strided q, k, v and out tensors, with repeated calls.

The same numbers run as views of a fused QKV tensor with a strided output, and as contiguous
tensors. Both results must be within budget. A repeated call with the same tensors must give the
same bits: a kernel that caches the strides of its first call fails here. Blocks that are far apart
give the bits of blocks that are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare_bits
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.outcome import NotRun
from attnlib.testing.runner import (
    attend,
    check_supported,
    compare_with_oracle,
    make_impl,
    run_materialized_case,
)

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


def _far_views(key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Copies of the views of a cache whose blocks lie 2^31 elements apart in all. Views of one
    allocation stay views of one."""
    shared = key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    groups = [[key, value]] if shared else [[key], [value]]
    found = []
    for views in groups:
        first = min(view.storage_offset() for view in views)
        last = max(view.storage_offset() - first + view.stride(0) for view in views)
        apart = max(2**31 // (views[0].shape[0] - 1), last) + 16
        apart -= apart % 16
        size = apart * (views[0].shape[0] - 1) + last
        try:
            pool = torch.empty(size, dtype=views[0].dtype, device=views[0].device)
        except RuntimeError as error:
            raise NotRun(
                f"blocks across 2^31 elements do not fit in memory: {str(error).splitlines()[0]}"
            ) from None
        for view in views:
            strides = (apart, *view.stride()[1:])
            far = pool.as_strided(view.shape, strides, view.storage_offset() - first)
            far.copy_(view)
            found.append(far)
    return found


def _check_far_blocks(target: BackendUnderTest, case: Case) -> str:
    """Blocks that lie so far apart that their offsets exceed 2^31 elements, and the same blocks one
    after the other."""
    check_supported(target.backend, case, target.device)
    near = run_materialized_case(target.backend, case.materialize(target.device))
    step = case.materialize(target.device)
    views = _far_views(step.inputs.cache.key, step.inputs.cache.value)
    cache = replace(step.inputs.cache, key=views[0], value=views[1], storage=())
    moved = replace(step, inputs=replace(step.inputs, cache=cache))
    same = compare_bits(run_materialized_case(target.backend, moved).out, near.out)
    if same.passed:
        return ""
    return f"the distance of blocks changes the result (P1): {same} | case: {case}"


def _strides(target: BackendUnderTest) -> Iterator[CheckCase]:
    for batch in ("decode", "prefill", "mixed"):
        case = target.case(batch=batch)
        yield CheckCase(batch, partial(_check, target, case), case)
        wide = case.replace(hidden_columns=7)  # the row stride of the table is not its width
        yield CheckCase(f"{batch}-wide_table", partial(_check, target, wide), wide)
    dtypes = [name for name in ("bfloat16", "float16") if target.supports(target.case(dtype=name))]
    far = target.case(
        batch="q1s37_q20s41", placement="top", dtype=(*dtypes, target.base_case.dtype)[0]
    )
    yield CheckCase("far_blocks", partial(_check_far_blocks, target, far), far)


CHECKS = (Check("K4", "strided inputs and outputs, repeated calls", _strides),)
