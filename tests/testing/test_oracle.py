"""The oracle equals a triple loop in Python floats and torch's scaled_dot_product_attention."""

from __future__ import annotations

import math

import pytest
import torch

from attnlib.testing.batch_spec import parse_batch
from attnlib.testing.block_placement import place_blocks
from attnlib.testing.inputs import StepInputs, make_inputs, make_oracle_params
from attnlib.testing.layouts import Dimensions
from attnlib.testing.oracle import OracleParams, unpaged_attention

DIMS = Dimensions(num_heads=6, num_kv_heads=2, head_size=8, head_size_v=4, block_size=4)
BATCH = "q3s9_q1s6_q2s0_q0s3_q4_q5s2_pad2"


def _inputs(batch: str = BATCH, dims: Dimensions = DIMS) -> StepInputs:
    parsed = parse_batch(batch)
    return make_inputs(parsed, dims, place_blocks(parsed, dims.block_size), seed=3)


def _bias_of(params: OracleParams, row: int, key: int, span_start: int) -> float:
    if params.query_bias is None or key < span_start:
        return 0.0
    return float(params.query_bias[row, key - span_start])


def _loop(
    inputs: StepInputs, params: OracleParams, row: int, head: int, request: int
) -> tuple[list[float], float]:
    """One output row from the M-rules, without tensor operations."""
    query_len, seq_len = inputs.batch.query_lens[request], inputs.batch.seq_lens[request]
    first_row = sum(inputs.batch.query_lens[:request])
    p = seq_len - query_len + (row - first_row)
    kv_head = head // (DIMS.num_heads // DIMS.num_kv_heads)
    causal = (
        bool(params.causal[request]) if isinstance(params.causal, torch.Tensor) else params.causal
    )
    left, right = params.window
    total = math.exp(float(params.sinks[head])) if params.sinks is not None else 0.0
    out = [0.0] * DIMS.head_size_v
    for k in range(seq_len):
        hidden = (
            (causal and k > p) or (left >= 0 and k < p - left) or (right >= 0 and k > p + right)
        )
        chunk = params.attention_chunk_size
        if hidden or (chunk and math.floor(k / chunk) != math.floor(p / chunk)):
            continue
        block, offset = inputs.placement.blocks[request][k // DIMS.block_size], k % DIMS.block_size
        dot = sum(
            float(inputs.query[row, head, d]) * float(inputs.cache.key[block, offset, kv_head, d])
            for d in range(DIMS.head_size)
        )
        score = params.scale * dot
        if params.logits_soft_cap:
            score = params.logits_soft_cap * math.tanh(score / params.logits_soft_cap)
        if params.alibi_slopes is not None:
            score -= float(params.alibi_slopes[head]) * abs(p - k)
        weight = math.exp(score + _bias_of(params, row, k, seq_len - query_len))
        total += weight
        for d in range(DIMS.head_size_v):
            out[d] += weight * float(inputs.cache.value[block, offset, kv_head, d])
    if total == 0.0:
        return [0.0] * DIMS.head_size_v, -math.inf
    return [x / total for x in out], math.log(total)


FEATURES: dict[str, dict[str, object]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "per_request_causal": {"causal": torch.tensor([True, False, True, False, True, False])},
    "window": {"window": (2, -1)},
    "two_sided_window": {"window": (1, 2), "causal": False},
    "own_key_only": {"window": (0, 0), "causal": False},
    "chunk": {"attention_chunk_size": 4},
    "soft_cap": {"logits_soft_cap": 0.7},
    "alibi": {"alibi_slopes": True, "causal": False},
    "sinks": {"sinks": True},
    "tree": {"query_bias": True},
    "all": {
        "window": (5, -1),
        "logits_soft_cap": 2.0,
        "alibi_slopes": True,
        "sinks": True,
        "query_bias": True,
    },
}


@pytest.mark.parametrize("name", FEATURES)
def test_oracle_equals_a_triple_loop(name: str) -> None:
    """M1 to M5 and M7."""
    inputs = _inputs()
    params = make_oracle_params(DIMS, inputs.batch, FEATURES[name])
    found = inputs.oracle(params)
    row = 0
    for request, query_len in enumerate(inputs.batch.query_lens):
        for _ in range(query_len):
            for head in range(DIMS.num_heads):
                out, lse = _loop(inputs, params, row, head, request)
                torch.testing.assert_close(
                    found.out[row, head].tolist(), out, rtol=1e-12, atol=1e-12
                )
                assert float(found.lse[row, head]) == pytest.approx(lse, abs=1e-12)
            row += 1
    assert (found.out[row:] == 0).all()
    assert (found.lse[row:] == -math.inf).all()


@pytest.mark.parametrize("causal", [True, False])
def test_oracle_equals_scaled_dot_product_attention(causal: bool) -> None:
    """M1: bottom-right; torch's is_causal is top-left, so the test passes a mask."""
    inputs = _inputs("q3s9_q6s30")
    found = inputs.oracle(make_oracle_params(DIMS, inputs.batch, {"causal": causal}))
    row = 0
    for request, (q, s) in enumerate(
        zip(inputs.batch.query_lens, inputs.batch.seq_lens, strict=True)
    ):
        slots = torch.tensor(inputs.placement.slots(request, 0, s, DIMS.block_size))
        keys = inputs.cache.key.reshape(-1, DIMS.num_kv_heads, DIMS.head_size)[slots].double()
        values = inputs.cache.value.reshape(-1, DIMS.num_kv_heads, DIMS.head_size_v)[slots].double()
        mask = (
            torch.ones(q, s, dtype=torch.bool).tril(s - q)
            if causal
            else torch.ones(q, s, dtype=torch.bool)
        )
        expected = torch.nn.functional.scaled_dot_product_attention(
            inputs.query[row : row + q].double().transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=mask,
            enable_gqa=True,
        )
        torch.testing.assert_close(
            found.out[row : row + q], expected.transpose(0, 1), rtol=1e-12, atol=1e-12
        )
        row += q


def test_unpaged_equals_paged() -> None:
    """Attention without a cache equals attention over pages."""
    inputs = _inputs("q6_q3_q0_q1")
    params = make_oracle_params(
        DIMS, inputs.batch, {"causal": False, "window": (2, 1), "sinks": True}
    )
    starts = inputs.query_start_loc
    unpaged = unpaged_attention(inputs.query, inputs.key, inputs.value, starts, starts, params)
    paged = inputs.oracle(params)
    assert torch.equal(unpaged.out, paged.out)
    assert torch.equal(unpaged.lse, paged.lse)


def test_lower_precision_has_a_plausible_error() -> None:
    """The baseline of the budgets has an error of the size that the dtype implies."""
    dims = Dimensions(dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    inputs = _inputs("q20_q1s50", dims)
    params = make_oracle_params(dims, inputs.batch, {})
    error = (
        (inputs.oracle(params, torch.bfloat16).out.double() - inputs.oracle(params).out).abs().max()
    )
    assert 1e-4 < error < 5e-2


def test_an_fp8_cache_holds_stored_times_scale() -> None:
    """M9: the oracle attends to the dequantized cache."""
    dims = Dimensions(cache_dtype=torch.float8_e4m3fn)
    parsed = parse_batch("q3s20")
    scales = {"k_scale": torch.tensor([0.5, 0.25]), "v_scale": 0.125}
    inputs = make_inputs(parsed, dims, place_blocks(parsed, 16), **scales)  # type: ignore[arg-type]
    params = make_oracle_params(dims, parsed, dict(scales))
    dequantized = make_inputs(parsed, Dimensions(), place_blocks(parsed, 16))
    dequantized.cache.key.copy_(inputs.cache.key.float() * scales["k_scale"][:, None])  # type: ignore[index]
    dequantized.cache.value.copy_(inputs.cache.value.float() * 0.125)
    expected = dequantized.oracle(make_oracle_params(Dimensions(), parsed, {}))
    torch.testing.assert_close(inputs.oracle(params).out, expected.out, rtol=1e-12, atol=1e-12)
    plain = make_inputs(parsed, Dimensions(), place_blocks(parsed, 16)).oracle(
        make_oracle_params(Dimensions(), parsed, {})
    )
    assert 1e-4 < (inputs.oracle(params).out - plain.out).abs().max() < 0.2
