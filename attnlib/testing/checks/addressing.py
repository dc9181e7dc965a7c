"""O1 and O2: addresses beyond 2^31 elements, and block tables of exact width.

O1 (P6): a request uses the last blocks of a pool with more than 2^31 elements. The pool is
allocated
    and not filled, so that on a CPU only the pages of that request use physical memory.
O2 (P3): the block table has exactly the columns that the longest sequence needs. It lies between
two
    zones of block id 2^30, so that a read past its end gives an invalid block. As a view of a wider
    table, it is followed by such ids in each row.
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
from attnlib.testing.layouts import CacheViews
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.outcome import NotRun
from attnlib.testing.runner import compare_with_oracle, run_case, run_materialized_case

__all__ = ["CHECKS"]

_LIMIT = 2**31


def _move_to_end_of_large_pool(step: MaterializedCase, device: torch.device) -> MaterializedCase:
    """Move the blocks of a step to the end of a pool with more than 2^31 elements.

    Raises:
        NotRun: the allocation fails.
    """
    inputs, dims = step.inputs, step.case.dimensions
    per_block = dims.block_size * dims.num_kv_heads * min(dims.head_size, dims.head_size_v)
    small = inputs.placement.num_blocks
    num_blocks = _LIMIT // per_block + small + 1
    views = []
    for view in (inputs.cache.key, inputs.cache.value):
        # Keep the memory order: HND pools are allocated heads first and transposed.
        heads_first = view.stride(2) > view.stride(1)
        page = (view.shape[2], view.shape[1]) if heads_first else (view.shape[1], view.shape[2])
        try:
            pool = torch.empty(num_blocks, *page, view.shape[3], dtype=view.dtype, device=device)
        except RuntimeError as error:
            raise NotRun(
                f"a pool of 2^31 elements does not fit in memory: {str(error).splitlines()[0]}"
            ) from None
        pool = pool.transpose(1, 2) if heads_first else pool
        pool[-small:].copy_(view)
        views.append(pool)
    shift = num_blocks - small
    owned = torch.tensor(
        [
            [column < len(row) for column in range(inputs.block_table.shape[1])]
            for row in inputs.placement.blocks
        ],
        dtype=torch.bool,
        device=device,
    ).view_as(inputs.block_table)
    moved = replace(
        inputs,
        cache=CacheViews(views[0], views[1], (), inputs.cache.layout),
        block_table=torch.where(owned, inputs.block_table + shift, 0).to(torch.int32),
        slot_mapping=torch.where(
            inputs.slot_mapping >= 0,
            inputs.slot_mapping + shift * dims.block_size,
            inputs.slot_mapping,
        ),
    )
    return replace(step, inputs=moved)


def _check_large_pool(target: BackendUnderTest, case: Case) -> str:
    step = _move_to_end_of_large_pool(
        case.materialize(target.device, kv_written=False), target.device
    )
    output = run_materialized_case(target.backend, step)
    error = compare_with_oracle(case, output, target.device)
    return (
        f"request at the end of a pool with more than 2^31 elements (P6): {error}" if error else ""
    )


def _beyond_int32(target: BackendUnderTest) -> Iterator[CheckCase]:
    dtype = next(
        (name for name in ("bfloat16", "float16") if target.supports(target.case(dtype=name))),
        None,
    )
    for name, batch in (
        ("decode", "q1s37_q1s20"),
        ("prefill", "q20s41_q3"),
        ("mixed", "q1s37_q1s16_q9s20"),
    ):
        case = target.case(
            batch=batch,
            dtype=dtype or target.base_case.dtype,
            layout=target.base_case.layout,
            poison="zero",
        )
        yield CheckCase(name, partial(_check_large_pool, target, case), case)


def _check_guarded(target: BackendUnderTest, case: Case) -> str:
    guarded = case.replace(guarded=True, extra_columns=0, garbage="huge")
    output = run_case(target.backend, guarded, target.device)
    plain = run_case(target.backend, case.replace(hidden_columns=0), target.device)
    if error := compare_with_oracle(guarded, output, target.device):
        return error
    same = compare_bits(output.out, plain.out)
    return (
        ""
        if same.passed
        else f"the width of the block table changes the result: {same} | case: {guarded}"
    )


def _exact_width(target: BackendUnderTest) -> Iterator[CheckCase]:
    block = target.base_case.block_size
    batches = {
        "decode": f"q1s{2 * block + 3}_q1s{block}_q1s1",
        "prefill": f"q{block + 1}_q{2 * block - 1}_q3",
        "mixed": f"q1s{3 * block + 1}_q{block - 1}_q2s{2 * block}",
        "long": f"q1s{19 * block + 5}_q1s2",
    }
    for name, batch in batches.items():
        case = target.case(batch=batch)
        yield CheckCase(name, partial(_check_guarded, target, case), case)
        wide = case.replace(hidden_columns=5)
        yield CheckCase(f"{name}-wide", partial(_check_guarded, target, wide), wide)


CHECKS = (
    Check("O2", "block tables of exact width", _exact_width),
    Check("O1", "pools beyond 2^31 elements", _beyond_int32),
)
