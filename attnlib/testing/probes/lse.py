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

from attnlib.testing.backend_under_test import Subject
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.materialized_case import Step
from attnlib.testing.probe import Check, Probe
from attnlib.testing.runner import Observation, judge, make_impl, run_case

__all__ = ["PROBES"]


def _check_form(subject: Subject, case: Case) -> str:
    """The LSE buffer is the caller's; what can go wrong is its meaning."""
    seen = run_case(subject.backend, case, subject.device)
    assert seen.lse is not None
    expected = case.step(subject.device).oracle().lse
    finite = torch.isfinite(expected)
    ratio = (
        (seen.lse.double()[finite] / expected[finite]).median()
        if finite.any()
        else torch.tensor(1.0)
    )
    wrong = judge(case, seen, subject.device)
    if wrong and abs(float(ratio) - 1.4427) < 0.02:
        return f"the LSE is in base 2: it must be the natural log (M5) | {wrong}"
    return wrong


def _form(subject: Subject) -> Iterator[Check]:
    for name, batch, features in (
        ("decode", "decode", {}),
        ("mixed", "mixed", {}),
        ("empty-rows", "empty_rows", {}),
        ("padding", "graph_padding", {}),
        ("sinks", "mixed", {"sinks": True}),
        ("soft-cap", "mixed", {"logits_soft_cap": 2.0}),
        ("long-decode", "decode_long", {}),
    ):
        case = subject.case(batch=batch, needs_lse=True, **features)
        yield Check(name, lambda case=case: _check_form(subject, case), case)  # type: ignore[misc]


def _attend_to_part(subject: Subject, step: Step, first_block: int, num_tokens: int) -> Observation:
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
    metadata = subject.backend.make_builder(step.spec, subject.device).build(0, part)
    out = torch.full_like(step.inputs.out, float("nan"))
    lse = torch.full(out.shape[:2], float("nan"), dtype=torch.float32, device=out.device)
    make_impl(subject.backend, step).forward(step.inputs.query, step.cache(), metadata, out, lse)
    return Observation(out, lse)


def _merge(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts in float64, by the definition: each weighs exp(its LSE)."""
    lse = torch.logaddexp(a[1], b[1])
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    weights = [torch.exp(part[1] - safe)[..., None] for part in (a, b)]
    return a[0] * weights[0] + b[0] * weights[1], lse


def _check_merge(subject: Subject, case: Case, cuts: Sequence[int]) -> str:
    """Cut at the given blocks, merge left to right and right to left, hold both against the oracle."""
    step = case.step(subject.device)
    batch: BatchSpec = case.batch_spec
    seq_len, block = batch.seq_lens[0], case.block_size
    edges = [0, *cuts, -(-seq_len // block)]
    parts = []
    for first, last in zip(edges, edges[1:], strict=False):
        tokens = min(last * block, seq_len) - min(first * block, seq_len)
        seen = _attend_to_part(subject, step, first, tokens)
        assert seen.lse is not None
        parts.append((seen.out.double(), seen.lse.double()))
    expected, honest = step.oracle(), step.oracle(case.torch_dtype)
    for name, ordered in (("left to right", parts), ("right to left", parts[::-1])):
        merged = ordered[0]
        for part in ordered[1:]:
            merged = _merge(merged, part)
        for value, truth, yardstick, quantity in (
            (merged[0], expected.out, honest.out, "merged_out"),
            (merged[1], expected.lse, honest.lse, "lse"),
        ):
            found = compare(value, truth, yardstick, case.torch_dtype, quantity)
            if not found.passed:
                return f"parts cut at blocks {list(cuts)}, merged {name}: {found} | case: {case}"
    return ""


def _merging(subject: Subject) -> Iterator[Check]:
    block = subject.base.block_size
    case = subject.case(batch=f"q1s{3 * block + 5}", needs_lse=True)
    for cuts in ((1,), (2,), (3,), (0,), (1, 2), (1, 1, 3), (4,)):
        name = "cut-" + "-".join(str(cut) for cut in cuts)
        yield Check(name, lambda cuts=cuts: _check_merge(subject, case, cuts), case)  # type: ignore[misc]


def _check_judged(subject: Subject, case: Case) -> str:
    return judge(case, run_case(subject.backend, case, subject.device), subject.device)


def _sinks(subject: Subject) -> Iterator[Check]:
    block = subject.base.block_size
    long = 20 * block if subject.quick else 60 * block
    for name, batch in (
        ("one-long", f"q1s{long + 3}"),
        ("long-and-short", f"q1s{long}_q1s1_q1s{block}_q1s{long // 3}"),
        ("many-short", f"9q1s{block + 2}"),
        ("verify", f"2q4s{long // 2}"),
        ("prefill", f"q{4 * block}_q3s{long // 2}"),
    ):
        for window in (None, 2 * block + 1):
            case = subject.case(batch=batch, sinks=True, sliding_window=window)
            if window is None or not subject.quick:
                yield Check(
                    f"{name}{'-window' if window else ''}",
                    lambda case=case: _check_judged(subject, case),  # type: ignore[misc]
                    case,
                )


PROBES = (
    Probe("L1", "the LSE is the natural log of the denominator", _form),
    Probe("L2", "parts merge to the whole", _merging),
    Probe("L3", "sinks count once, however keys are split", _sinks),
)
