"""Limits of the LSE and of capped outputs: right results of few rows pass, wrong ones fail."""

from __future__ import annotations

import math

import pytest
import torch

from attnlib.debug.replay import replay
from attnlib.testing.case import Case
from attnlib.testing.runner import AttentionOutput, compare_with_oracle
from attnlib.testing.score_rounding import COARSE_EXPONENTIAL
from tests.testing.toy_backend import ToyImpl, toy_with
from tests.testing.wrong_backends import BaseTwoLse, SinkIgnoredInDecode

FEW_ROWS = {
    # The largest share of the coarse exponential: all scores are near 0.
    "small scores": Case(
        batch="2q1s20", num_heads=2, head_size=16, dtype="float16", scale=0.001, seed=787373
    ),
    "one row": Case(
        batch="q1s40",
        num_heads=1,
        num_kv_heads=1,
        head_size=16,
        dtype="bfloat16",
        scale=0.001,
        seed=182657,
    ),
    "sink": Case(
        batch="2q1s20",
        num_heads=1,
        num_kv_heads=1,
        head_size=16,
        dtype="float16",
        sinks=True,
        scale=0.05,
        seed=978503,
    ),
    # One visible key: the LSE is a score, whose products cancel.
    "one key": Case(
        batch="q1s2",
        num_heads=1,
        num_kv_heads=1,
        head_size=16,
        sliding_window=1,
        scale=1.0,
        seed=30999,
    ),
}


@pytest.mark.parametrize("name", FEW_ROWS)
def test_right_lses_of_few_rows_are_within_budget(name: str) -> None:
    """M5, M8: the same-precision computation of one row may be nearly exact by chance."""
    result = replay(FEW_ROWS[name].replace(needs_lse=True).materialize(), "torch")
    assert result.passed, result


class _Float32Tanh(ToyImpl):
    """tanh(x) as 1 - 2 / (1 + exp(2 x)) in float32, as the Triton kernels compute it."""

    def logits(
        self, query: torch.Tensor, keys: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor:
        limit = self.spec.logits_soft_cap
        assert limit is not None
        scores = (self.scale * torch.einsum("qhd,khd->qhk", query, keys)).float()
        return (limit * (1 - 2 / (1 + torch.exp(2 * (scores / limit))))).double()


class _CoarseTanh(_Float32Tanh):
    """A tanh with an error of 2^-11, as of `tanh.approx`."""

    def logits(
        self, query: torch.Tensor, keys: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor:
        return super().logits(query, keys, distance) * (1 + 2.0**-11)


class _OneKeyTooMany(ToyImpl):
    """Counts the key of the largest score twice."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, _ = super().weigh(scores, values, sink)
        twice = torch.cat([scores, scores.amax(dim=2, keepdim=True)], dim=2)
        return out, super().weigh(twice, torch.cat([values, values[:1]]), sink)[1]


@pytest.mark.parametrize("batch", ["q1s1", "q1s2", "q3s7", "q1s5_q2s30"])
@pytest.mark.parametrize("seed", range(4))
def test_right_capped_results_of_few_rows_are_within_budget(batch: str, seed: int) -> None:
    """M3: the error of a capped score is relative to the cap, however small the score is."""
    case = Case(
        batch=batch, logits_soft_cap=50.0, scale=1.0, num_heads=2, needs_lse=True, seed=seed
    )
    for scale in (1.0, 0.05, 0.01):
        result = replay(case.replace(scale=scale).materialize(), toy_with(_Float32Tanh))
        assert result.passed, result
    wrong = replay(case.materialize(), toy_with(_CoarseTanh))
    assert "lse over budget" in str(wrong)
    assert "out over budget" in str(wrong) or batch == "q1s1"  # the weight of one key is 1


@pytest.mark.parametrize("name", FEW_ROWS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_wrong_lses_of_few_rows_are_over_budget(name: str, dtype: str) -> None:
    """M4, M5: base 2, one key too many, and a missing sink."""
    case = FEW_ROWS[name].replace(needs_lse=True, dtype=dtype)
    wrong = [BaseTwoLse, _OneKeyTooMany]
    if case.sinks:
        wrong.append(SinkIgnoredInDecode)
    for kind in wrong:
        result = replay(case.materialize(), toy_with(kind))
        assert "lse over budget" in str(result), (kind, result)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_exponential_of_torch_is_as_exact_as_the_limit_says(dtype: torch.dtype) -> None:
    """The error depends on the fractional part of the base-2 exponent: scores from 0 to -1 have all
    of them. 65 keys are more than a vector of the operator."""
    scores = -(torch.arange(256) / 256).to(dtype)
    query = torch.zeros(256, 1, 1, 16, dtype=dtype)
    query[..., 0] = 1
    keys = torch.zeros(256, 1, 65, 16, dtype=dtype)
    keys[:, 0, 1:, 0] = scores[:, None]
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, torch.zeros_like(keys), 0.0, False, scale=1.0
    )
    exact = torch.log1p(64 * torch.exp(scores.double()))
    assert float((lse.double().flatten() - exact).abs().max()) < COARSE_EXPONENTIAL


def test_limits_of_an_lse_near_zero_come_from_its_scores() -> None:
    """Two keys whose scores are -ln 2 have an LSE of 0; the roundings of the scores remain."""
    case = Case(batch="q1s2", num_heads=1, num_kv_heads=1, head_size=16, needs_lse=True)
    step = case.materialize()
    step.inputs.query.fill_(0.25)
    for view in (step.inputs.cache.key,):
        view.fill_(-math.log(2))
    expected = step.oracle()
    assert float(expected.lse.abs().max()) < 1e-6
    moved = expected.lse + 1e-6
    output = AttentionOutput(expected.out.float(), moved)
    assert compare_with_oracle(case, output, "cpu", reference=step) == ""
    output = AttentionOutput(expected.out.float(), expected.lse + 1e-4)
    assert "lse over budget" in compare_with_oracle(case, output, "cpu", reference=step)
