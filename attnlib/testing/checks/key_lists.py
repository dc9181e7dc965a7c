"""S4: lists of selected keys at the borders of what a backend may take a shortcut for (M11).

Lists that select every key but one block differ from a layer without a selection in this block
only. Many lists of large heads need more memory than a backend gathers at a time, so that biases
and score functions must use the positions of the right part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.key_selection import KeyLists, selected_masks, selection_of
from attnlib.testing.runner import (
    AttentionOutput,
    check_supported,
    compare_with_oracle,
    make_impl,
    run_case,
)

__all__ = ["CHECKS"]

_NEARLY = {
    "tokens": ("all_heads", 1, 44, 1),
    "blocks": ("kv_head", 16, 3, 1),
    "shared": ("query_head", 8, 6, 6),
}
_MANY: dict[str, dict[str, object]] = {
    "plain": {},
    "alibi": {"alibi": True},
    "score": {"score": "attnlib.testing.score_functions:POSITIONS"},
    "query_bias": {"mask": "query_bias"},
    "window+sinks": {"sliding_window": 37, "sinks": True},
    "per_request+fp8": {"mask": "per_request", "kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5},
}


def _without(lists: KeyLists, row: int, block: int) -> KeyLists:
    """The lists without a block in row `row`, for the last head."""
    indices = lists.indices.clone()
    own = indices[row, -1]
    indices[row, -1] = torch.where(own == block, -1, own)
    return KeyLists(indices, lists.list_start_loc)


def _check_nearly(target: BackendUnderTest, case: Case) -> str:
    check_supported(target.backend, case, target.device)
    selection, lists = selection_of(case.key_selection), case.key_lists
    assert selection is not None and lists is not None
    step, batch = case.materialize(target.device), case.batch_spec
    metadata = target.backend.make_builder(case.spec, target.device).build(0, step.common())
    impl, row = make_impl(target.backend, step), 0
    for query_len, seq_len in batch.lengths:
        for begin in range(0, query_len, selection.query_block_size):
            end = min(begin + selection.query_block_size, query_len)
            own = (seq_len - query_len + end - 1) // selection.block_size
            for block in {0, own} if begin == 0 or end == query_len else ():
                changed = _without(lists, row, block)
                masks = selected_masks(changed, selection, batch, case.num_heads)
                of_device = tuple(mask.to(target.device) for mask in masks)
                expected = replace(step, params=replace(step.params, selected=of_device))
                out = torch.full_like(step.inputs.out, torch.nan)
                given = changed.to(target.device)
                impl.forward_selected(step.inputs.query, step.cache(), metadata, given, out)
                result = AttentionOutput(out, None)
                if error := compare_with_oracle(case, result, target.device, expected):
                    return f"list {row} selects everything but block {block}: {error}"
            row += 1
    return ""


def _check_many(target: BackendUnderTest, case: Case) -> str:
    return compare_with_oracle(case, run_case(target.backend, case, target.device), target.device)


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, form in _NEARLY.items():
        case = target.case(
            batch="q1s44_q14s30_q5",
            key_selection=form,
            selects_everything=True,
            needs_lse=False,
        )
        yield CheckCase(f"nearly-{name}", partial(_check_nearly, target, case), case)
    for name, fields in _MANY.items():
        heads = {"num_heads": 8, "num_kv_heads": 2, "head_size": 512}
        fields = {**heads, "key_selection": ("all_heads", 2, 200, 1), **fields}
        case = target.case(batch="q1s90_q45s300", **fields)
        if not target.quick or name in ("alibi", "score", "query_bias"):
            yield CheckCase(f"many-{name}", partial(_check_many, target, case), case)
    for dtype in ("float16", "bfloat16"):
        case = target.case(batch="q1s90_q9s44", key_selection=("kv_head", 16, 3, 1), dtype=dtype)
        yield CheckCase(dtype, partial(_check_many, target, case), case)


CHECKS = (Check("S4", "lists that select nearly everything, and many lists", _cases),)
