"""L1 to L3: the log-sum-exp, merging of partial results, and attention sinks.

L1: natural log, float32, [T, Hq], -inf for rows without keys. A base-2 LSE is wrong by a factor of
    1.44.
L2: the keys of a decode are split at block boundaries, including empty parts. Attention over each
    part, merged in either order, must equal attention over all keys.
L3: batches with sinks and sequences of very different lengths, so that kernels that split the keys
    have splits with few or no keys. Each sink must count once, and a sink of -inf not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.runner import AttentionOutput, compare_with_oracle, make_impl, run_case

__all__ = ["CHECKS"]


def _check_lse(target: BackendUnderTest, case: Case) -> str:
    """Compare the LSE with the oracle and detect base 2."""
    output = run_case(target.backend, case, target.device)
    assert output.lse is not None
    expected = case.materialize(target.device).oracle().lse
    finite = torch.isfinite(expected)
    ratio = (
        (output.lse.double()[finite] / expected[finite]).median()
        if finite.any()
        else torch.tensor(1.0)
    )
    error = compare_with_oracle(case, output, target.device)
    if error and abs(float(ratio) - 1.4427) < 0.02:
        return f"the LSE is a base-2 log; it must be the natural log (M5) | {error}"
    return error


def _lse(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, batch, features in (
        ("decode", "decode", {}),
        ("mixed", "mixed", {}),
        ("empty-rows", "empty_rows", {}),
        ("sinks", "mixed", {"sinks": True}),
        ("soft-cap", "mixed", {"logits_soft_cap": 2.0}),
        ("long-decode", "decode_long", {}),
        ("many-decodes", "many_decodes", {}),
        ("long-keys", "long_keys", {}),
        ("long-keys-alibi", "long_keys", {"alibi": True}),
        ("long-prefill", "long_prefill", {}),
        ("sinks-disabled", "mixed", {"sinks": True, "disabled_sinks": True}),
    ):
        case = target.case(batch=batch, needs_lse=True, **features)
        yield CheckCase(name, partial(_check_lse, target, case), case)


def _attend_to_part(
    target: BackendUnderTest, step: MaterializedCase, first_block: int, num_tokens: int
) -> AttentionOutput:
    """Attend to `num_tokens` tokens of the step's only request, from block `first_block` on."""
    common = step.common()
    lens = torch.full_like(step.inputs.seq_lens, num_tokens)
    assert common.block_table_tensor is not None
    part = common.replace(
        block_table_tensor=common.block_table_tensor[:, first_block:].contiguous(),
        seq_lens=lens,
        seq_lens_cpu=lens.cpu(),
        num_computed_tokens_cpu=(lens.cpu() - 1).clamp(min=0),
        max_seq_len=num_tokens,
    )
    metadata = target.backend.make_builder(step.spec, target.device).build(0, part)
    out = torch.full_like(step.inputs.out, float("nan"))
    lse = torch.full(out.shape[:2], float("nan"), dtype=torch.float32, device=out.device)
    make_impl(target.backend, step).forward(step.inputs.query, step.cache(), metadata, out, lse)
    return AttentionOutput(out, lse)


def _merge(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two partial results in float64; the weight of each is exp(its LSE)."""
    lse = torch.logaddexp(a[1], b[1])
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    weights = [torch.exp(part[1] - safe)[..., None] for part in (a, b)]
    return a[0] * weights[0] + b[0] * weights[1], lse


def _check_merge(target: BackendUnderTest, case: Case, split_points: Sequence[int]) -> str:
    """Split at the given blocks, merge in both orders, and compare with the oracle."""
    step = case.materialize(target.device)
    batch: BatchSpec = case.batch_spec
    seq_len, block = batch.seq_lens[0], case.block_size
    edges = [0, *split_points, -(-seq_len // block)]
    parts = []
    for first, last in zip(edges, edges[1:], strict=False):
        tokens = min(last * block, seq_len) - min(first * block, seq_len)
        output = _attend_to_part(target, step, first, tokens)
        assert output.lse is not None
        parts.append((output.out.double(), output.lse.double()))
    expected, same_precision = step.oracle(), step.oracle(case.torch_dtype)
    for name, ordered in (("left to right", parts), ("right to left", parts[::-1])):
        merged = ordered[0]
        for part in ordered[1:]:
            merged = _merge(merged, part)
        for value, reference, baseline, quantity in (
            (merged[0], expected.out, same_precision.out, "merged_out"),
            (merged[1], expected.lse, same_precision.lse, "lse"),
        ):
            comparison = compare(value, reference, baseline, case.torch_dtype, quantity)
            if not comparison.passed:
                return (
                    f"keys split at blocks {list(split_points)}, merged {name}: {comparison} "
                    f"| case: {case}"
                )
    return ""


def _merging(target: BackendUnderTest) -> Iterator[CheckCase]:
    block = target.base_case.block_size
    case = target.case(batch=f"q1s{3 * block + 5}", needs_lse=True)
    for split_points in ((1,), (2,), (3,), (0,), (1, 2), (1, 1, 3), (4,)):
        name = "cut-" + "-".join(str(point) for point in split_points)
        yield CheckCase(name, partial(_check_merge, target, case, split_points), case)


def _check_against_oracle(target: BackendUnderTest, case: Case) -> str:
    return compare_with_oracle(case, run_case(target.backend, case, target.device), target.device)


def _sinks(target: BackendUnderTest) -> Iterator[CheckCase]:
    block = target.base_case.block_size
    long = 20 * block if target.quick else 60 * block
    for name, batch in (
        ("one-long", f"q1s{long + 3}"),
        ("long-and-short", f"q1s{long}_q1s1_q1s{block}_q1s{long // 3}"),
        ("many-short", f"9q1s{block + 2}"),
        ("verify", f"2q4s{long // 2}"),
        ("prefill", f"q{4 * block}_q3s{long // 2}"),
    ):
        for window in (None, 2 * block + 1):
            case = target.case(batch=batch, sinks=True, sliding_window=window)
            if window is None or not target.quick:
                yield CheckCase(
                    f"{name}{'-window' if window else ''}",
                    partial(_check_against_oracle, target, case),
                    case,
                )
    for batch in ("decode_long", "prefill", "mixed", "empty_rows"):
        case = target.case(batch=batch, sinks=True, disabled_sinks=True)
        yield CheckCase(f"disabled-{batch}", partial(_check_against_oracle, target, case), case)


CHECKS = (
    Check("L1", "the LSE is the natural log of the denominator", _lse),
    Check("L2", "partial results merge to the full result", _merging),
    Check("L3", "sinks count once if keys are split", _sinks),
)
