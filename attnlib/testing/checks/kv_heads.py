"""W3: the KV head that each query head reads, for keys and for values.

Query head h reads KV head h // (Hq / Hkv). Values: all keys are zero, and the value of KV head g is
one-hot at g. Keys: the value of token k is one-hot at k, and KV head g has one large key, at token
g. In both cases, the largest element of an output row is the KV head that was read. All other
checks see only that the numbers are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.checks.visibility import NAN_OUTPUT
from attnlib.testing.inputs import StepInputs
from attnlib.testing.layouts import write_slots
from attnlib.testing.runner import run_materialized_case

__all__ = ["CHECKS"]

_HEADS = {1: 4, 2: 4, 3: 4, 4: 2, 5: 3, 8: 2}
"""Query heads per KV head -> KV heads."""
_BATCHES = {"decode": "q1s37_q1s9", "prefill": "q21s40_q5s12"}
_SCORE = 30.0
"""Score of the large key: exp(-30) of the weight remains for the others."""


def _fill(inputs: StepInputs, part: str, scale: float) -> None:
    """Write queries, keys and values in which the part of the cache identifies the KV head."""
    dims, device = inputs.dims, inputs.query.device
    heads = range(dims.num_kv_heads)
    inputs.query.zero_()
    inputs.query[..., 0] = _SCORE**0.5 / scale**0.5
    for request, seq_len in enumerate(inputs.batch.seq_lens):
        shape = (seq_len, dims.num_kv_heads)
        keys = torch.zeros(*shape, dims.head_size, dtype=dims.dtype, device=device)
        values = torch.zeros(*shape, dims.head_size_v, dtype=dims.dtype, device=device)
        for head in heads:
            if part == "values":
                values[:, head, head] = 1.0
            else:
                keys[head, head, 0] = _SCORE**0.5 / scale**0.5
                values[head, :, head] = 1.0
        slots = inputs.placement.slots(request, 0, seq_len, dims.block_size)
        write_slots(inputs.cache.key, slots, keys, 1.0)
        write_slots(inputs.cache.value, slots, values, 1.0)


def _check(target: BackendUnderTest, case: Case) -> str:
    group = case.num_heads // case.num_kv_heads
    for part in ("values", "keys"):
        step = case.materialize(target.device)
        _fill(step.inputs, part, step.params.scale)
        out = run_materialized_case(target.backend, step).out.float()
        for row in range(case.batch_spec.num_actual_tokens):
            if out[row].isnan().any():
                return f"the query of row {row} {NAN_OUTPUT} | case: {case}"
            read = out[row, :, : case.num_kv_heads].argmax(dim=1).tolist()
            expected = [head // group for head in range(case.num_heads)]
            if read != expected:
                head = next(h for h in range(case.num_heads) if read[h] != expected[h])
                pattern = [h % case.num_kv_heads for h in range(case.num_heads)]
                hint = ", which is h % num_kv_heads" if read == pattern else ""
                return (
                    f"query head {head} reads the {part} of KV head {read[head]}; expected "
                    f"{expected[head]}: query head h reads KV head h // {group}. The heads read "
                    f"KV heads {read}{hint} | case: {case}"
                )
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    for group, kv_heads in _HEADS.items():
        for phase, batch in _BATCHES.items():
            case = target.case(
                batch=batch, num_heads=group * kv_heads, num_kv_heads=kv_heads, needs_lse=False
            )
            yield CheckCase(f"group-{group}-{phase}", partial(_check, target, case), case)
    for dtype in ("float32", "bfloat16", "float16"):  # kernels may have tiles of 8 query heads
        case = target.case(
            batch=_BATCHES["decode"], num_heads=32, num_kv_heads=2, dtype=dtype, needs_lse=False
        )
        yield CheckCase(f"group-16-{dtype}", partial(_check, target, case), case)


CHECKS = (Check("W3", "which KV head each query head reads", _cases),)
