"""D1 and D2: reproducible bits.

D2 (M8): the same call on new tensors gives the same bits, also after calls of other layers.
D1 (M8): with `batch_invariant=True`, random batches run as a whole and request by request, and a
    prefill runs as a whole and in chunks. Every row must have the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.batch_slicing import slice_batch
from attnlib.testing.budget import compare_bits
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import (
    attend,
    compare_with_oracle,
    make_impl,
    run_case,
    run_materialized_case,
)

__all__ = ["CHECKS"]

_OTHER_LAYERS: tuple[dict[str, object], ...] = (
    {"sliding_window": 3},
    {"logits_soft_cap": 2.0, "scale": 0.7},
    {"num_kv_heads": 1, "sinks": True},
    {"alibi": True, "batch": "decode"},
)


def _check_repeated_calls(target: BackendUnderTest, case: Case) -> str:
    first, second = (run_case(target.backend, case, target.device) for _ in range(2))
    comparisons = [compare_bits(second.out, first.out, "out")]
    if first.lse is not None and second.lse is not None:
        comparisons.append(compare_bits(second.lse, first.lse, "lse"))
    errors = [str(comparison) for comparison in comparisons if not comparison.passed]
    return (
        f"the same call gives different bits (M8): {'; '.join(errors)} | case: {case}"
        if errors
        else ""
    )


def _check_other_layers(target: BackendUnderTest, case: Case) -> str:
    """A call alone, and the same call after other kinds of layers have run."""
    alone = run_case(target.backend, case, target.device)
    step = case.materialize(target.device)
    metadata = target.backend.make_builder(step.spec, target.device).build(0, step.common())
    impl = make_impl(target.backend, step)
    for changes in _OTHER_LAYERS:
        other = case.replace(**changes)
        if not target.supports(other):
            continue
        run_case(target.backend, other, target.device)
        same = compare_bits(attend(impl, step, metadata).out, alone.out)
        if not same.passed:
            return f"another layer changes the bits of a call (M8): {same} | case: {other}"
    return ""


def _repeated_calls(target: BackendUnderTest) -> Iterator[CheckCase]:
    for batch in ("decode_long", "prefill", "mixed"):
        case = target.case(batch=batch)
        yield CheckCase(batch, partial(_check_repeated_calls, target, case), case)
    case = target.case(batch="mixed")
    yield CheckCase("other-layers", partial(_check_other_layers, target, case), case)


def _random_batch(seed: int, block: int) -> str:
    draw = random.Random(seed)
    parts = [f"q1s{draw.randint(1, 6 * block)}" for _ in range(draw.randint(1, 4))]
    parts += [
        f"q{q}s{q + draw.randint(0, 3 * block)}"
        for q in (draw.randint(2, 2 * block) for _ in range(2))
    ]
    return "_".join(parts)


def _check_single_requests(target: BackendUnderTest, case: Case) -> str:
    step = case.materialize(target.device)
    found = run_materialized_case(target.backend, step)
    if error := compare_with_oracle(case, found, target.device):
        return error
    together, row = found.out.clone(), 0
    for request, query_len in enumerate(case.batch_spec.query_lens):
        alone = run_materialized_case(target.backend, slice_batch(step, [request])).out
        same = compare_bits(together[row : row + query_len], alone)
        if not same.passed:
            return (
                f"batch_invariant=True is declared, but request {request} has different bits alone "
                f"and in its batch (M8): {same} | case: {case}"
            )
        row += query_len
    return ""


def _check_chunks(target: BackendUnderTest, case: Case, chunk: int) -> str:
    step = case.materialize(target.device)
    length = case.batch_spec.query_lens[0]
    found = run_materialized_case(target.backend, step)
    if error := compare_with_oracle(case, found, target.device):
        return error
    whole = found.out.clone()
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        part = run_materialized_case(target.backend, slice_batch(step, [0], [(start, stop)])).out
        same = compare_bits(part, whole[start:stop])
        if not same.passed:
            return (
                f"batch_invariant=True is declared, but tokens {start} to {stop} of a prefill have "
                f"different bits as a separate chunk (M8): {same} | case: {case}"
            )
    return ""


def _check_prefixes(target: BackendUnderTest, case: Case) -> str:
    """Rows of a causal sequence do not depend on the tokens after them."""
    step = case.materialize(target.device)
    found = run_materialized_case(target.backend, step)
    if error := compare_with_oracle(case, found, target.device):
        return error
    whole, length = found.out.clone(), case.batch_spec.query_lens[0]
    for stop in (1, 5, length // 2, length - 1):
        part = run_materialized_case(target.backend, slice_batch(step, [0], [(0, stop)])).out
        same = compare_bits(part, whole[:stop])
        if not same.passed:
            return (
                f"batch_invariant=True is declared, but the first {stop} of {length} tokens have "
                f"different bits without the others (M15): {same} | case: {case}"
            )
    return ""


_FEATURES: dict[str, dict[str, object]] = {
    "sinks": {"sinks": True, "needs_lse": True},
    "window": {"sliding_window": 9},
    "two-sided-window": {"mask": "bidirectional", "window": (7, 3)},
    "chunk": {"attention_chunk_size": 21},
    "alibi+soft_cap": {"alibi": True, "logits_soft_cap": 3.0},
    "tree": {"mask": "query_bias"},
    "score_function": {"score": "attnlib.testing.score_functions:POSITIONS"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5},
    "bfloat16": {"dtype": "bfloat16"},
}


def _invariance(target: BackendUnderTest) -> Iterator[CheckCase]:
    block = target.base_case.block_size
    for draw in range(3 if target.quick else 8):
        batch = _random_batch(1000 * target.seed + draw, block)
        case = target.case(batch=batch, batch_invariant=True, needs_lse=False)
        yield CheckCase(f"batch-{draw}", partial(_check_single_requests, target, case), case)
    case = target.case(batch=f"q{3 * block + 5}", batch_invariant=True, needs_lse=False)
    for chunk in (block, block + 7) if target.quick else (5, block, block + 7, 2 * block):
        yield CheckCase(
            f"chunks-of-{chunk}",
            partial(_check_chunks, target, case, chunk),
            case,
        )
    fields = {"attn_type": "encoder_only", "batch_invariant": True, "needs_lse": False}
    case = target.case(batch=f"q{3 * block + 5}", **fields)
    yield CheckCase("prefixes-unpaged", partial(_check_prefixes, target, case), case)
    for feature, fields in _FEATURES.items():
        batch = f"q1s{block + 3}_q{block + 9}s{3 * block}_q5_q1s{2 * block}"
        case = target.case(batch=batch, batch_invariant=True, **fields)
        yield CheckCase(feature, partial(_check_single_requests, target, case), case)


CHECKS = (
    Check("D2", "repeated calls give the same bits", _repeated_calls),
    Check("D1", "results do not depend on the batch, if declared", _invariance),
)
