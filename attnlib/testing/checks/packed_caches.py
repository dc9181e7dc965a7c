"""A4: attention over the packed cache of vLLM's PagedAttention (`packed_decode`, `packed_prefill`).

Results are compared with the oracle, those of a block-sparse pattern too. Cases are unsupported
where a backend has no such operation (`AttentionBackend.get_operation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attnlib.ops.block_sparse import BlockSparsePattern
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.operation_calls import (
    call_operation,
    compare_sequence,
    operation_case,
    operation_params,
)
from attnlib.testing.oracle import gather_tokens
from attnlib.testing.runner import AttentionOutput, compare_with_oracle

__all__ = ["CHECKS", "packed_views"]


def packed_views(step: MaterializedCase) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache in the layout of `ops.packed_cache`."""
    key, value = step.inputs.cache.key, step.inputs.cache.value
    x = 16 // key.element_size()
    key = key.contiguous().view(*key.shape[:3], -1, x).permute(0, 2, 3, 1, 4)
    return key.contiguous(), value.permute(0, 2, 3, 1).contiguous()


def _visible(pattern: BlockSparsePattern, seq_len: int) -> torch.Tensor:
    """The keys that a query at the last position sees, as `ops.block_sparse` specifies:
    `[Hq, 1, seq_len]`."""
    step, group = pattern.head_sliding_step, pattern.num_heads // pattern.num_kv_heads
    last = (seq_len - 1) // pattern.block_size
    masks = torch.zeros(pattern.num_heads, 1, seq_len, dtype=torch.bool)
    for head in range(pattern.num_heads):
        if step >= 0:
            offset = 1 + step * (pattern.tp_rank * pattern.num_heads + head)
        else:
            offset = 1 - step * (pattern.tp_rank * pattern.num_kv_heads + head // group)
        for key in range(seq_len):
            block = key // pattern.block_size
            striped = (block + offset) % pattern.vert_stride == 0
            masks[head, 0, key] = striped or block > last - pattern.local_blocks
    return masks


def _check_packed_decode(
    target: BackendUnderTest, case: Case, stripes: tuple[int, ...] | None
) -> str:
    step = case.materialize(target.device)
    inputs, pattern = step.inputs, None
    if stripes is not None:
        local, stride, size, shift, rank = stripes
        heads = (case.num_heads, case.num_kv_heads)
        pattern = BlockSparsePattern(local, stride, size, shift, *heads, rank)
        masks = [_visible(pattern, length).to(target.device) for length in inputs.batch.seq_lens]
        step = replace(step, params=replace(step.params, selected=tuple(masks)))
    out = torch.full_like(inputs.query, torch.nan)
    call_operation(
        target,
        "packed_decode",
        inputs.query,
        *packed_views(step),
        inputs.block_table,
        inputs.seq_lens,
        operation_params(step),
        max_seq_len=inputs.batch.max_seq_len + 5,
        out=out,
        pattern=pattern,
    )
    return compare_with_oracle(case, AttentionOutput(out, None), target.device, step)


def _check_packed_prefill(target: BackendUnderTest, case: Case) -> str:
    """New keys and values are used as given: they are not in the cache, and have no scale."""
    step = case.materialize(target.device, kv_written=False)
    inputs, batch = step.inputs, step.inputs.batch
    out = torch.full_like(inputs.query, torch.nan)
    call_operation(
        target,
        "packed_prefill",
        inputs.query,
        inputs.key,
        inputs.value,
        *packed_views(step),
        inputs.block_table,
        inputs.query_start_loc,
        inputs.seq_lens,
        operation_params(step),
        max_query_len=batch.max_query_len,
        out=out,
    )

    def with_context(request: int, view: torch.Tensor, new: torch.Tensor, scale: Any) -> Any:
        length = batch.seq_lens[request] - batch.query_lens[request]
        old = gather_tokens(view, inputs.block_table[request], length).double()
        factor = torch.as_tensor(scale, device=old.device).expand(old.shape[1]).double()
        return torch.cat([old * factor[:, None], new.double()])

    plain, starts = replace(step.params, k_scale=1.0, v_scale=1.0), inputs.query_start_loc.tolist()
    for request in range(batch.num_reqs):
        own = slice(starts[request], starts[request + 1])
        key = with_context(request, inputs.cache.key, inputs.key[own], step.params.k_scale)
        value = with_context(request, inputs.cache.value, inputs.value[own], step.params.v_scale)
        tensors = (out[own], inputs.query[own], key, value)
        if error := compare_sequence(*tensors, plain.of_request(request, own), case):
            return f"request {request}: {error}"
    if bool(out[batch.num_actual_tokens :].any()):
        return f"padding rows must be exactly 0 (M6) | case: {case}"
    return ""


def _check_no_requests(target: BackendUnderTest, case: Case, phase: str) -> str:
    """Without requests, no block is read: the pool has none."""
    step = case.materialize(target.device)
    views = [view[:0] for view in packed_views(step)]
    rows = 0 if phase == "decode" else 3
    query, new = step.inputs.query[:rows], (step.inputs.key[:rows], step.inputs.value[:rows])
    out = torch.full_like(query, torch.nan)
    table, lengths = step.inputs.block_table[:0], step.inputs.seq_lens[:0]
    params, starts = operation_params(step), step.inputs.query_start_loc[:1]
    if phase == "decode":
        arguments, bound = (query, *views, table, lengths), {"max_seq_len": 0}
    else:
        arguments = (query, *new, *views, table, starts, lengths)
        bound = {"max_query_len": 0}
    call_operation(target, f"packed_{phase}", *arguments, params, **bound, out=out)
    if bool((out != 0).any()):
        return f"padding rows must be exactly 0 (M6) | case: {case}"
    return ""


_PACKED_DECODES: dict[str, tuple[dict[str, object], tuple[int, ...] | None]] = {
    "plain": ({}, None),
    "alibi": ({"alibi": True, "scale": 0.3}, None),
    "fp8": ({"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5, "v_scale": 2.0}, None),
    "fp8-heads": (
        {"kv_cache_dtype": "fp8_e4m3", "kv_scale_kind": "head", "k_scale": 0.5, "v_scale": 2.0},
        None,
    ),
    "stripes": ({}, (1, 3, 16, 0, 0)),
    "stripes-of-heads": ({"alibi": True}, (2, 4, 32, 1, 2)),
    "stripes-of-kv-heads": (
        {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5, "v_scale": 0.25},
        (1, 3, 16, -2, 1),
    ),
}
"""Name -> fields of the case; local blocks, stride, block size and step of a pattern, and rank."""
_PACKED_PREFILLS: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"sliding_window": 9},
    "alibi": {"alibi": True, "scale": 0.3},
    "no-context": {"batch": "q9_q17_q1"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5, "v_scale": 2.0},
    "fp8-heads": {
        "kv_cache_dtype": "fp8_e4m3",
        "kv_scale_kind": "head",
        "k_scale": 0.5,
        "v_scale": 2.0,
    },
}


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    def named(name: str, run: Callable[..., str], *options: object, **fields: object) -> CheckCase:
        case = operation_case(target, **fields)
        return CheckCase(name, partial(run, target, case, *options), case)

    for name, (fields, stripes) in _PACKED_DECODES.items():
        fields = {"batch": "q1s100_q1s1_q1s16_q1s37_q1s0", **fields}
        yield named(f"decode-{name}", _check_packed_decode, stripes, **fields)
    for name, fields in _PACKED_PREFILLS.items():
        fields = {"batch": "q5s40_q7_q1s16_q3s33_pad2", **fields}
        yield named(f"prefill-{name}", _check_packed_prefill, **fields)
    for phase in ("decode", "prefill"):
        yield named(f"{phase}-no-requests", _check_no_requests, phase)


CHECKS = (Check("A4", "attention over packed caches of blocks", _cases),)
