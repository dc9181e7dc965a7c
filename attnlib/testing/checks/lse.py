"""L1-L3: the LSE is what it says, parts merge to the whole, and sinks count once.

L1: natural log, float32, [T, Hq], contiguous, -inf for empty rows; a base-2 leak fails by a factor of 1.44.
L2: the keys of a decode are cut at block boundaries (an empty part included), each part is attended to on its own, and
the parts merge, in either order of association, to the single pass.
L3: with sinks, sequences of very different lengths in one batch, so that a kernel that splits its keys has splits with
little and with no work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.runner import AttentionOutput, compare_with_oracle, make_impl, run_case

__all__ = ["CHECKS"]


def _check_form(target: BackendUnderTest, case: Case) -> str:
    """The LSE buffer is the caller's; what can go wrong is its meaning."""
    seen = run_case(target.backend, case, target.device)
    assert seen.lse is not None
    expected = case.materialize(target.device).oracle().lse
    finite = torch.isfinite(expected)
    ratio = (
        (seen.lse.double()[finite] / expected[finite]).median()
        if finite.any()
        else torch.tensor(1.0)
    )
    wrong = compare_with_oracle(case, seen, target.device)
    if wrong and abs(float(ratio) - 1.4427) < 0.02:
        return f"the LSE is in base 2: it must be the natural log (M5) | {wrong}"
    return wrong


def _form(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, batch, features in (
        ("decode", "decode", {}),
        ("mixed", "mixed", {}),
        ("empty-rows", "empty_rows", {}),
        ("padding", "graph_padding", {}),
        ("sinks", "mixed", {"sinks": True}),
        ("soft-cap", "mixed", {"logits_soft_cap": 2.0}),
        ("long-decode", "decode_long", {}),
    ):
        case = target.case(batch=batch, needs_lse=True, **features)
        yield CheckCase(name, lambda case=case: _check_form(target, case), case)  # type: ignore[misc]


def _attend_to_part(
    target: BackendUnderTest, step: MaterializedCase, first_block: int, num_tokens: int
) -> AttentionOutput:
    """A decode whose keys are tokens [first_block * N, ... + num_tokens) of the step's one request."""
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
    """Two parts in float64, by the definition: each weighs exp(its LSE)."""
    lse = torch.logaddexp(a[1], b[1])
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    weights = [torch.exp(part[1] - safe)[..., None] for part in (a, b)]
    return a[0] * weights[0] + b[0] * weights[1], lse


def _check_merge(target: BackendUnderTest, case: Case, cuts: Sequence[int]) -> str:
    """Cut at the given blocks, merge left to right and right to left, hold both against the oracle."""
    step = case.materialize(target.device)
    batch: BatchSpec = case.batch_spec
    seq_len, block = batch.seq_lens[0], case.block_size
    edges = [0, *cuts, -(-seq_len // block)]
    parts = []
    for first, last in zip(edges, edges[1:], strict=False):
        tokens = min(last * block, seq_len) - min(first * block, seq_len)
        seen = _attend_to_part(target, step, first, tokens)
        assert seen.lse is not None
        parts.append((seen.out.double(), seen.lse.double()))
    expected, same_precision = step.oracle(), step.oracle(case.torch_dtype)
    for name, ordered in (("left to right", parts), ("right to left", parts[::-1])):
        merged = ordered[0]
        for part in ordered[1:]:
            merged = _merge(merged, part)
        for value, truth, yardstick, quantity in (
            (merged[0], expected.out, same_precision.out, "merged_out"),
            (merged[1], expected.lse, same_precision.lse, "lse"),
        ):
            found = compare(value, truth, yardstick, case.torch_dtype, quantity)
            if not found.passed:
                return f"parts cut at blocks {list(cuts)}, merged {name}: {found} | case: {case}"
    return ""


def _merging(target: BackendUnderTest) -> Iterator[CheckCase]:
    block = target.base_case.block_size
    case = target.case(batch=f"q1s{3 * block + 5}", needs_lse=True)
    for cuts in ((1,), (2,), (3,), (0,), (1, 2), (1, 1, 3), (4,)):
        name = "cut-" + "-".join(str(cut) for cut in cuts)
        yield CheckCase(name, lambda cuts=cuts: _check_merge(target, case, cuts), case)  # type: ignore[misc]


def _check_judged(target: BackendUnderTest, case: Case) -> str:
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
                    lambda case=case: _check_judged(target, case),  # type: ignore[misc]
                    case,
                )


CHECKS = (
    Check("L1", "the LSE is the natural log of the denominator", _form),
    Check("L2", "parts merge to the whole", _merging),
    Check("L3", "sinks count once, however keys are split", _sinks),
)
