"""A6: relations between results of the operations that no attention layer runs.

No attention is computed here. Slots lead back to their positions, requests in another order are
appended to the same places, equal states and a state without weight merge to what they were,
sequences with a window of 1 return their values, cached keys with a scale equal keys that are
multiplied by it, and weights and values give the output of the layer. Cases are unsupported where
a backend has no such operation (`AttentionBackend.get_operation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare, compare_bits
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.checks.packed_caches import packed_views
from attnlib.testing.operation_calls import call_operation, operation_case, operation_params
from attnlib.testing.oracle import gather_tokens
from attnlib.testing.runner import run_materialized_case

__all__ = ["CHECKS"]


def _table(rows: int, columns: int, seed: int) -> torch.Tensor:
    """A block table that names every block once."""
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(seed))
    return order.view(rows, columns).int()


def _check_slots(target: BackendUnderTest, case: Case) -> str:
    """The column of a slot's block, and the offset in it, give the position of the token."""
    size, lengths = 4, [(3, 9), (1, 40), (6, 8), (9, 14), (0, 5)]
    table = _table(len(lengths), 3, case.seed)
    starts = torch.tensor([0, *(query_len for query_len, _ in lengths)]).cumsum(0).int()
    seq_lens = torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32)
    given = [x.to(target.device) for x in (starts, seq_lens, table)]
    found = call_operation(target, "compute_slot_mapping", *given, size, int(starts[-1]), None)
    slots = iter(found.tolist())
    for request, (query_len, seq_len) in enumerate(lengths):
        row = table[request].tolist()
        for position, slot in zip(range(seq_len - query_len, seq_len), slots, strict=False):
            if position >= len(row) * size and slot < 0:
                continue
            block, offset = divmod(slot, size)
            if block not in row or row.index(block) * size + offset != position:
                return (
                    f"slot {slot} of request {request} with blocks {row} of {size} tokens is not "
                    f"that of position {position} (P3) | case: {case}"
                )
    return ""


def _check_append(target: BackendUnderTest, case: Case) -> str:
    """Requests in another order write the same caches."""
    draw, cached, heads, count, size = (
        torch.Generator().manual_seed(case.seed),
        [9, 0, 3, 5],
        2,
        2,
        4,
    )
    table = _table(len(cached), 4, case.seed)
    tokens = torch.randn(2, len(cached), count, heads, case.head_size, generator=draw)
    pages = torch.randn(2, table.numel(), size, heads, case.head_size, generator=draw)
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        new = tokens[:, order].to(target.device, case.torch_dtype)
        caches = pages.to(target.device, case.torch_dtype, copy=True)
        lengths = torch.tensor(cached, dtype=torch.int32)[order].to(target.device)
        rows, after = table[order].to(target.device), torch.zeros_like(lengths)
        call_operation(target, "append_kv", *new, *caches, rows, lengths, after)
        results.append(caches)
    same = compare_bits(results[1], results[0], "caches")
    return "" if same.passed else f"another order of requests: {same} (P4) | case: {case}"


def _check_merged(target: BackendUnderTest, case: Case) -> str:
    """A state with a state of no weight is itself; with an equal state, its LSE grows by log 2."""
    draw, dtype = torch.Generator().manual_seed(case.seed), case.torch_dtype
    out = torch.randn(7, 3, case.head_size, generator=draw).to(target.device, dtype)
    lse = torch.randn(7, 3, generator=draw).to(target.device)
    other = torch.randn(7, 3, case.head_size, generator=draw).to(target.device, dtype)
    for name, states, grows in (
        ("with a state of no weight", (out, lse, other, lse - 300.0), 0.0),
        ("behind a state of no weight", (other, lse - 300.0, out, lse), 0.0),
        ("with itself", (out, lse, out.clone(), lse.clone()), math.log(2)),
    ):
        found = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
        call_operation(target, "merge_states", *states, *found)
        expected = out.double(), lse.double() + grows
        for quantity, result, want in zip(("out", "lse"), found, expected, strict=True):
            compared = compare(result, want, want.to(result.dtype), dtype, quantity)
            if not compared.passed:
                return f"a state merged {name}: {compared} (M5) | case: {case}"
    return ""


def _check_context(target: BackendUnderTest, case: Case) -> str:
    """With a window of 1, each token of a sequence returns its value."""
    step = case.materialize(target.device)
    inputs, out = step.inputs, torch.zeros_like(step.inputs.query)
    starts, lengths = (
        torch.tensor(numbers, dtype=torch.int32, device=target.device)
        for numbers in ((30, 2), (10, 21))
    )
    tensors = (inputs.query, inputs.key, inputs.value, starts, lengths)
    params = operation_params(step)
    call_operation(target, "context_attention", *tensors, params, max_seq_len=21, out=out)
    values = inputs.value.repeat_interleave(case.num_heads // case.num_kv_heads, dim=1)
    for first, last in ((30, 40), (2, 23)):
        want = values[first:last]
        compared = compare(out[first:last], want.double(), want, case.torch_dtype)
        if not compared.passed:
            return f"tokens that see their own key alone: {compared} | case: {case}"
    return ""


def _check_scales(target: BackendUnderTest, case: Case, phase: str) -> str:
    """Cached elements k with the scale 1, and 2 k with the scale 0.5; new tokens have no scale."""
    results = []
    for scale in (1.0, 0.5):
        step = case.materialize(target.device, kv_written=phase == "decode")
        inputs, batch = step.inputs, step.inputs.batch
        for view in (inputs.cache.key, inputs.cache.value):
            whole = (view.float() * 2).round().clamp(-8, 8)
            view.copy_((whole / scale).to(view.dtype))
        params = replace(operation_params(step), k_scale=scale, v_scale=scale)
        views, lens = packed_views(step), (inputs.block_table, inputs.seq_lens)
        out = torch.full_like(inputs.query, torch.nan)
        if phase == "decode":
            call_operation(
                target,
                "packed_decode",
                inputs.query,
                *views,
                *lens,
                params,
                max_seq_len=batch.max_seq_len,
                out=out,
            )
        else:
            new = (inputs.query, inputs.key, inputs.value)
            at = (inputs.block_table, inputs.query_start_loc, inputs.seq_lens)
            call_operation(
                target,
                "packed_prefill",
                *new,
                *views,
                *at,
                params,
                max_query_len=batch.max_query_len,
                out=out,
            )
        results.append(out)
    same = compare_bits(results[1], results[0])
    return "" if same.passed else f"a scale of 0.5 and doubled elements: {same} | case: {case}"


def _check_scores(target: BackendUnderTest, case: Case) -> str:
    """The weights and the values give the output of the layer."""
    step = case.materialize(target.device)
    inputs, group = step.inputs, case.num_heads // case.num_kv_heads
    found = call_operation(
        target,
        "attention_scores",
        inputs.query,
        inputs.cache.key,
        inputs.cache.value,
        inputs.block_table,
        inputs.query_start_loc,
        inputs.seq_lens,
        operation_params(step),
    )
    output = run_materialized_case(target.backend, step).out
    own, starts = step.oracle(case.torch_dtype).out, inputs.query_start_loc.tolist()
    for request, weights in enumerate(found):
        rows = slice(starts[request], starts[request + 1])
        length = inputs.batch.seq_lens[request]
        values = gather_tokens(inputs.cache.value, inputs.block_table[request], length).double()
        values = values.repeat_interleave(group, dim=1)
        expected = torch.einsum("hqk,khd->qhd", weights.double(), values)
        compared = compare(output[rows], expected, own[rows], case.torch_dtype)
        if not compared.passed:
            return f"weights and values of request {request}: {compared} | case: {case}"
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    def named(name: str, run: Callable[..., str], **fields: object) -> CheckCase:
        case = operation_case(target, **fields)
        return CheckCase(name, partial(run, target, case), case)

    yield named("slots", _check_slots)
    yield named("append", _check_append)
    yield named("merged", _check_merged)
    yield named("context", _check_context, batch="q44", sliding_window=1)
    yield named("scores", _check_scores, batch="q1s37_q9s20_q4")
    for phase, batch in (("decode", "q1s100_q1s1_q1s37"), ("prefill", "q5s40_q7_q1s16")):
        run = partial(_check_scales, phase=phase)
        yield named(f"scales-{phase}", run, batch=batch, kv_cache_dtype="fp8_e4m3")


CHECKS = (Check("A6", "relations between results of operations outside of layers", _cases),)
