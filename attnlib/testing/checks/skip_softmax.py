"""S4: keys are left out only if their weights are below the threshold of the layer (M18).

The keys of some tiles are small, so that their weights are below the threshold in all rows. Output
and LSE may differ from the oracle by what the keys with weights below the threshold contribute, and
by the error budget. A backend that leaves out a larger key, or skips tiles by another threshold,
differs by more.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.oracle import OracleResult, gather_tokens
from attnlib.testing.runner import check_supported, run_materialized_case

__all__ = ["CHECKS"]

_BATCHES = {"prefill": "q70s400_q33s200", "mixed": "q1s300_q80_q9s270_q2s2"}
_FEATURES: dict[str, dict[str, object]] = {
    "sinks": {"sinks": True},
    "window": {"sliding_window": 200},
    "soft_cap": {"logits_soft_cap": 30.0},
    "alibi": {"alibi": True},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "head-128": {"head_size": 128, "num_heads": 8, "dtype": "bfloat16"},
    "encoder": {"attn_type": "encoder_only", "mask": "bidirectional", "batch": "q200_q70"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.25},
}
_TILE = 64
_FACTORS = (1.5, 0.1, 0.6, 0.3)
"""Factors of the keys of consecutive tiles."""
_THRESHOLDS = {"large": 2.0**-4, "small": 2.0**-12}


def _scale_keys(step: MaterializedCase) -> None:
    """Multiply the keys of each tile of each request by its factor."""
    inputs = step.inputs
    starts, lengths = inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()
    for request, length in enumerate(lengths):
        positions = torch.arange(length, device=inputs.query.device)
        factors = torch.tensor(_FACTORS, device=inputs.query.device)
        factors = factors[positions // _TILE % len(_FACTORS)][:, None, None]
        if not step.case.is_paged:
            inputs.key[starts[request] : starts[request + 1]] *= factors
            continue
        block_size = inputs.cache.key.shape[1]
        blocks = inputs.block_table[request, positions // block_size].long()
        keys = inputs.cache.key[blocks, positions % block_size]
        changed = (keys.float() * factors).to(keys.dtype)
        inputs.cache.key[blocks, positions % block_size] = changed


def _allowed(
    step: MaterializedCase, expected: OracleResult, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far output [T, Hq, Dv] may differ from the oracle's, and how far the LSE [T, Hq] may be
    below it, if keys with weights below the threshold are left out."""
    out = torch.zeros_like(expected.out)
    lse = torch.zeros_like(expected.lse)
    first = 0
    for request, weights in enumerate(expected.weights):
        rows = slice(first, first + weights.shape[1])
        first = rows.stop
        if weights.shape[2] == 0 or weights.shape[1] == 0:
            continue
        values = _values(step, request).double().abs()
        values = values.repeat_interleave(weights.shape[0] // values.shape[1], 1).transpose(0, 1)
        # The margin covers scores that another precision rounds across the threshold.
        small = weights * (weights < 1.1 * threshold * weights.amax(-1, keepdim=True))
        share = small.sum(-1)
        found = expected.out[rows].double().abs().transpose(0, 1)
        error = (share.unsqueeze(-1) * found + small @ values) / (1 - share).unsqueeze(-1)
        out[rows] = error.transpose(0, 1).to(out.dtype)
        lse[rows] = -torch.log1p(-share).transpose(0, 1)
    return out, lse


def _values(step: MaterializedCase, request: int) -> torch.Tensor:
    """The real values of a request, [seq_len, Hkv, Dv]."""
    inputs, case = step.inputs, step.case
    if not case.is_paged:
        starts = inputs.query_start_loc.tolist()
        return inputs.value[starts[request] : starts[request + 1]]
    length = int(inputs.seq_lens[request])
    stored = gather_tokens(inputs.cache.value, inputs.block_table[request], length)
    return stored.double() * case.v_scale


def _check(target: BackendUnderTest, case: Case) -> str:
    check_supported(target.backend, case, target.device)
    step = case.materialize(target.device)
    _scale_keys(step)
    output = run_materialized_case(target.backend, step)
    expected, same_precision = step.oracle(), step.oracle(case.torch_dtype)
    assert case.skip_softmax_threshold is not None
    out_error, lse_error = _allowed(step, expected, case.skip_softmax_threshold)
    difference = output.out.double() - expected.out
    out = output.out.double() - difference.clamp(min=-out_error, max=out_error)
    found = [compare(out, expected.out, same_precision.out, case.torch_dtype, "out")]
    if output.lse is not None:
        finite = expected.lse.isfinite()
        lse = output.lse.double()
        below = torch.where(finite, lse - expected.lse, 0.0)
        lse = lse - below.clamp(min=-lse_error, max=torch.zeros_like(lse_error))
        found.append(compare(lse, expected.lse, same_precision.lse, case.torch_dtype, "lse"))
    errors = [str(comparison) for comparison in found if not comparison.passed]
    return f"{'; '.join(errors)} | case: {case}" if errors else ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    base: dict[str, object] = {"scale": 1.0, "needs_lse": True}
    for name, threshold in _THRESHOLDS.items():
        for phase, batch in _BATCHES.items():
            if not target.quick or (name, phase) == ("small", "mixed"):
                fields = {**base, "batch": batch, "skip_softmax_threshold": threshold}
                case = target.case(**fields)
                yield CheckCase(f"{name}-{phase}", partial(_check, target, case), case)
    for feature, changes in _FEATURES.items():
        if not target.quick or feature == "head-128":
            fields = {"batch": _BATCHES["mixed"], **base, "skip_softmax_threshold": 2.0**-6}
            case = target.case(**fields | changes)
            yield CheckCase(feature, partial(_check, target, case), case)


CHECKS = (Check("S4", "only keys below the threshold are left out", _cases),)
