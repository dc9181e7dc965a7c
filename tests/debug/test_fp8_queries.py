"""M19 in the audit: queries and weights rounded to e4m3."""

from __future__ import annotations

import pytest
import torch

from attnlib.debug import fp8_queries
from attnlib.debug.fp8_queries import round_queries
from attnlib.debug.kv_audit import AUDIT_FORMATS, AuditFormat, audit_call
from attnlib.testing.case import Case
from attnlib.testing.materialized_case import MaterializedCase
from tests.debug.recorded_calls import captured

FORMAT = AuditFormat("fp8 queries", "fp8_e4m3", "one", fp8_queries=True)
PLAIN = AuditFormat("fp8", "fp8_e4m3", "one")


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounding to four significant bits, by arithmetic (normal numbers and those below 2^-6)."""
    exponent = (torch.frexp(x.double()).exponent - 1).clamp_min(-6)
    unit = torch.pow(2.0, exponent.double() - 3)
    return torch.round(x.double() / unit) * unit


def _expected(step: MaterializedCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of causal prefills by the text of M19, token by token, in float64."""
    inputs, params = step.inputs, step.params
    size, heads, kv_heads = step.spec.head_size, step.spec.num_heads, step.spec.num_kv_heads
    key, value = (
        _e4m3(view.nan_to_num(0.0)).reshape(-1, kv_heads, size)
        for view in (inputs.cache.key, inputs.cache.value)
    )
    out = torch.zeros(inputs.query.shape[0], heads, size, dtype=torch.float64)
    lse = torch.zeros(inputs.query.shape[0], heads, dtype=torch.float64)
    starts = inputs.query_start_loc.tolist()
    for request, seq_len in enumerate(inputs.batch.seq_lens):
        slots = inputs.placement.slots(request, 0, seq_len, step.spec.block_size)
        first, last = starts[request], starts[request + 1]
        for row in range(first, last):
            seen = slots[: seq_len - (last - 1 - row)]
            for head in range(heads):
                query, kv_head = inputs.query[row, head].double(), head * kv_heads // heads
                rounds = last - first > 1
                if rounds:
                    scale = 2.0 ** (7 - torch.floor(torch.log2(query.abs().max())))
                    query = _e4m3(query * scale) / scale
                scores = key[seen, kv_head] @ query * params.scale
                weights = torch.exp(scores - scores.max())
                total = weights.sum()
                if rounds:
                    weights = _e4m3(weights * 256) / 256
                out[row, head] = weights @ value[seen, kv_head] / total
                lse[row, head] = scores.max() + total.log()
    return out, lse


@pytest.mark.parametrize("scores", [1 << 24, 200], ids=["whole", "in-parts"])
def test_errors_are_those_of_the_rule(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """M19: queries with a scale of their own, weights relative to the largest one, LSE without the
    rounding of weights; requests with one query token are exact."""
    monkeypatch.setattr(fp8_queries, "_SCORES", scores)
    step = captured(Case(batch="q9s40_q1s30_q20", num_heads=4, num_kv_heads=2, head_size=32))
    exact = step.oracle()
    out, lse = _expected(step)
    found = audit_call(step, [FORMAT])["fp8 queries"]
    error = (out - exact.out).norm() / exact.out.norm()
    assert found.output_error == pytest.approx(float(error), rel=1e-3)
    assert found.max_error == pytest.approx(float((out - exact.out).abs().max()), rel=1e-3)
    off = (lse - exact.lse).abs()
    assert found.max_lse_error == pytest.approx(float(off.max()), rel=1e-3)
    assert found.mean_lse_error == pytest.approx(float(off.mean()), rel=1e-3)


def test_only_prefills_are_rounded() -> None:
    """Over decodes the row equals that without rounded queries; over prefills it is larger."""
    decodes, prefills = (
        audit_call(captured(Case(batch=batch, head_size=32)), [PLAIN, FORMAT])
        for batch in ("3q1s40", "q30s60")
    )
    assert decodes["fp8 queries"].output_error == decodes["fp8"].output_error
    assert decodes["fp8 queries"].max_lse_error == decodes["fp8"].max_lse_error
    assert 1.1 * prefills["fp8"].output_error < prefills["fp8 queries"].output_error < 0.1


def test_features_of_the_layer_are_kept() -> None:
    """Windows, sinks, soft caps, padding and scales per head: the error stays that of rounding."""
    case = Case(
        batch="graph_padding", num_heads=4, num_kv_heads=2, head_size=32, sliding_window=7,
        sinks=True, logits_soft_cap=5.0,
    )  # fmt: skip
    step = captured(case)
    per_head = AuditFormat("head", "fp8_e4m3", "head", fp8_queries=True)
    found = audit_call(step, [per_head, FORMAT])
    assert 0 < found["head"].output_error < 0.08 and 0 < found["fp8 queries"].output_error < 0.08


def test_the_audit_has_the_row_and_scales_for_e5m2() -> None:
    rows = {one.label: one for one in AUDIT_FORMATS}
    assert rows["fp8_e4m3, fp8 queries"].fp8_queries
    assert rows["fp8_e5m2"].scales == "tensor"
    step = captured(Case(batch="q30s60", head_size=32))
    step.inputs.cache.value.mul_(2.0**17)  # beyond the range of e5m2 with a scale of 1
    found = audit_call(step, [rows["fp8_e5m2"], rows["fp8_e5m2, scale 1"]])
    assert found["fp8_e5m2, scale 1"].saturation > 0.1
    assert found["fp8_e5m2"].saturation == 0 and found["fp8_e5m2"].output_error < 0.1


def test_small_queries_and_infinities() -> None:
    query = torch.full((1, 3, 8), 0.0)
    query[0, 1] = 1e-37
    query[0, 2, 0] = torch.inf
    rounded = round_queries(query)
    assert not rounded[0, 0].any() and rounded[0, 2].isnan().any()
    assert rounded[0, 1].isfinite().all()
