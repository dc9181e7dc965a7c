"""W4: the weight of each part of a long sequence.

All keys are equal, so that all visible keys have the same weight, and the value of key k is one-hot
at its part of the sequence, k * Dv // seq_len. An output row then contains the share of the visible
keys in each part, which is counted without a softmax. In contrast to W2, one call covers sequences
of any length: dropped splits, positions that are wrong behind some limit, and a wrong factor show.

With random keys and values of 1, an output is the sum of the weights, which is 1. Weights that are
rounded in one direction, or divided by another sum, give another number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import accumulate

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.inputs import StepInputs
from attnlib.testing.layouts import write_slots
from attnlib.testing.oracle import visible_keys
from attnlib.testing.runner import check_least_product, run_materialized_case

__all__ = ["CHECKS"]

_CASES: dict[str, dict[str, object]] = {
    "many_decodes": {"batch": "many_decodes"},
    "long_keys": {"batch": "long_keys"},
    "long_prefill": {"batch": "long_prefill"},
    "window": {"batch": "long_keys", "sliding_window": 2500},
    "chunks": {"batch": "long_keys", "attention_chunk_size": 1500},
    "soft_cap": {"batch": "long_prefill", "logits_soft_cap": 3.0},
    "bfloat16": {"batch": "long_prefill", "dtype": "bfloat16"},
    "float16": {"batch": "long_prefill", "dtype": "float16"},
    "head-256": {"batch": "q1s700_q2s300", "head_size": 256},
}
_LARGE: dict[str, tuple[float, dict[str, object]]] = {
    "large": (20000.0, {}),
    "large-negative": (-70000.0, {}),
    "large-soft_cap": (20000.0, {"logits_soft_cap": 50.0}),
}
"""Name -> the score of all keys, fields of the case."""


_SUMS: dict[str, dict[str, object]] = {
    dtype: {"batch": "many_decodes", "dtype": dtype} for dtype in ("float32", "bfloat16", "float16")
}


def _part(seq_len: int, num_parts: int) -> torch.Tensor:
    """[seq_len], the part of each key."""
    return torch.arange(seq_len) * num_parts // seq_len


def _fill(inputs: StepInputs, score: float = 0.0) -> None:
    """Write keys of one score, and values that are one-hot at the part of the key."""
    dims, device = inputs.dims, inputs.query.device
    level = math.sqrt(abs(score) / math.sqrt(dims.head_size))
    if score:
        inputs.query.fill_(math.copysign(level, score))
    for request, seq_len in enumerate(inputs.batch.seq_lens):
        rows = torch.nn.functional.one_hot(_part(seq_len, dims.head_size_v), dims.head_size_v)
        values = rows.to(device, dims.dtype)[:, None].expand(-1, dims.num_kv_heads, -1)
        keys = values.new_full((seq_len, dims.num_kv_heads, dims.head_size), level)
        slots = inputs.placement.slots(request, 0, seq_len, dims.block_size)
        write_slots(inputs.cache.key, slots, keys, 1.0)
        write_slots(inputs.cache.value, slots, values, 1.0)


def _shares(case: Case) -> torch.Tensor:
    """[T, Dv] float64: the share of the visible keys in each part of the sequence."""
    params, batch, parts = case.oracle_params("cpu"), case.batch_spec, case.dimensions.head_size_v
    found = []
    for request, (query_len, seq_len) in enumerate(batch.lengths):
        positions = seq_len - query_len + torch.arange(query_len)
        visible = visible_keys(positions, seq_len, params.of_request(request, slice(0, 0)))
        one_hot = torch.nn.functional.one_hot(_part(seq_len, parts), parts).double()
        counts = visible.double() @ one_hot
        found.append(counts / counts.sum(dim=1, keepdim=True).clamp(min=1))
    return torch.cat(found)


def _describe(case: Case, actual: torch.Tensor, expected: torch.Tensor, limit: float) -> str:
    """The first element above the limit, in terms of keys; "" if there is none."""
    wrong = torch.nonzero(~((actual - expected).abs() <= limit))
    if not len(wrong):
        return ""
    token, head, part = wrong[0].tolist()
    batch = case.batch_spec
    ends = list(accumulate(batch.query_lens))
    request = next(r for r, end in enumerate(ends) if token < end)
    position = batch.seq_lens[request] - ends[request] + token
    keys = torch.nonzero(_part(batch.seq_lens[request], actual.shape[2]) == part).flatten()
    span = f"{int(keys[0])}-{int(keys[-1])}" if len(keys) else "of no position"
    return (
        f"the query at position {position} of request {request}, "
        f"head {head}, gives keys {span} the weight {float(actual[token, head, part]):.6g}; "
        f"expected {float(expected[token, head, part]):.6g} | "
    )


def _check(target: BackendUnderTest, case: Case, score: float = 0.0) -> str:
    check_least_product(target.backend, case, score)
    step = case.materialize(target.device).modify_inputs(partial(_fill, score=score))
    out = run_materialized_case(target.backend, step).out.cpu()
    expected = _shares(case)[:, None].expand(out.shape)
    same_precision = step.oracle(case.torch_dtype).out.cpu()
    # A large score times log2(e) has a rounding error, which is that of the sum and not of weights
    # in 16 bits: all weights have one bias.
    quantity = "merged_out" if score else "out"
    found = compare(out, expected, same_precision, case.torch_dtype, quantity)
    if found.passed:
        return ""
    where = _describe(case, out.double(), expected, found.max_allowed)
    return f"{where}{found} | case: {case}"


def _check_sum(target: BackendUnderTest, case: Case) -> str:
    def fill(inputs: StepInputs) -> None:
        for request, seq_len in enumerate(inputs.batch.seq_lens):
            shape = (seq_len, inputs.dims.num_kv_heads, inputs.dims.head_size_v)
            ones = torch.ones(shape, dtype=inputs.dims.dtype, device=inputs.query.device)
            slots = inputs.placement.slots(request, 0, seq_len, inputs.dims.block_size)
            write_slots(inputs.cache.value, slots, ones, 1.0)

    step = case.materialize(target.device).modify_inputs(fill)
    out = run_materialized_case(target.backend, step).out.cpu()
    same_precision = step.oracle(case.torch_dtype).out.cpu()
    found = compare(out, torch.ones_like(out, dtype=torch.float64), same_precision, out.dtype)
    return "" if found.passed else f"the weights of a query do not sum to 1: {found} | case: {case}"


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, fields in _CASES.items():
        case = target.case(**fields, needs_lse=False)
        yield CheckCase(name, partial(_check, target, case), case)
    for name, (score, fields) in _LARGE.items():
        case = target.case(batch="q300_q1s500_q4s40", **fields, needs_lse=False)
        yield CheckCase(name, partial(_check, target, case, score), case)
    for name, fields in _SUMS.items():
        case = target.case(**fields, needs_lse=False)
        yield CheckCase(f"sum-{name}", partial(_check_sum, target, case), case)


CHECKS = (Check("W4", "how much weight each part of a sequence has", _cases),)
