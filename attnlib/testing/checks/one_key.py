"""W5: a query that sees one key returns its value, and the LSE is the score of the key.

A window of 1 leaves each query its own key, whose weight is 1: no softmax is needed to know the
result. Wrong scales, rounded queries, keys that are hidden by a finite number, and running maxima
that begin at one, show as an error of one product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import FLOAT8_QUERY_STEP, compare
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.layouts import read_slots
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.page_formats import PAGE_LAYOUT_NAMES, PAGE_NAMES, dequantize_tokens
from attnlib.testing.runner import check_supported, run_materialized_case

__all__ = ["CHECKS"]

_BATCH = "q1s37_q20_q5s40_q1s1"
_SEVERAL_TILES = "q1s37_q300_q5s40"
"""Rows whose first or last tile of keys is hidden as a whole."""
_FP8: dict[str, object] = {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5}
_CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "fp8": _FP8,
    "fp8_per_head": {**_FP8, "kv_scale_kind": "head"},
    "soft_cap": {"logits_soft_cap": 3.0},
    "large_scores": {"scale": 3000.0, "batch": _SEVERAL_TILES},
    "huge_scores": {"scale": 60000.0},
    "large_scores-soft_cap": {"scale": 3000.0, "logits_soft_cap": 50.0},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
}
_FLOAT8_QUERIES: dict[str, object] = {
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_size": 128,
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8_e4m3",
    "allow_fp8_queries": True,
    "needs_lse": True,
}


def _own_tokens(step: MaterializedCase) -> tuple[torch.Tensor, torch.Tensor]:
    """The real values of the keys and values of this step, [n, Hq, D] float64, from the cache."""
    inputs, slots = step.inputs, step.inputs.written_slots()
    given = inputs.cache.scales or (step.params.k_scale, step.params.v_scale)
    found = []
    for view, scale in zip((inputs.cache.key, inputs.cache.value), given, strict=True):
        stored = read_slots(view, slots)
        if inputs.cache.scales is not None:
            assert isinstance(scale, torch.Tensor)
            real = dequantize_tokens(stored, read_slots(scale, slots))
        else:
            factor = torch.as_tensor(scale, dtype=torch.float64, device=stored.device)
            real = stored.double() * factor.expand(stored.shape[1])[:, None]
        found.append(real.repeat_interleave(step.case.num_heads // real.shape[1], dim=1))
    return found[0], found[1]


def _scores(step: MaterializedCase, keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n, Hq] float64: the score of each query and its own key, as the product in `dtype`."""
    products = (step.inputs.query[: len(keys)].to(dtype) * keys.to(dtype)).sum(-1).double()
    scores, cap = step.params.scale * products, step.params.logits_soft_cap
    return cap * torch.tanh(scores / cap) if cap else scores


def _use_keys_as_queries(step: MaterializedCase) -> None:
    """Query heads that equal their key, with the other sign in every second row: scores are large,
    and errors of products have one direction."""
    group = step.case.num_heads // step.case.num_kv_heads
    step.inputs.query.copy_(step.inputs.key.repeat_interleave(group, dim=1))
    step.inputs.query[1::2].neg_()


def _check(target: BackendUnderTest, case: Case, own_keys: bool) -> str:
    check_supported(target.backend, case, target.device)
    step = case.materialize(target.device, kv_written=False)
    if own_keys:
        _use_keys_as_queries(step)
    found = run_materialized_case(target.backend, step)
    keys, values = _own_tokens(case.materialize(target.device))
    count, dtype = len(keys), case.torch_dtype
    comparisons = [compare(found.out[:count], values, values.to(dtype), dtype)]
    if found.lse is not None:
        scores, rounded = _scores(step, keys, torch.float64), _scores(step, keys, dtype)
        comparisons.append(compare(found.lse[:count], scores, rounded, dtype, "lse"))
    errors = "; ".join(str(comparison) for comparison in comparisons if not comparison.passed)
    return f"queries that see their own key alone: {errors} | case: {case}" if errors else ""


def _check_float8_queries(target: BackendUnderTest, case: Case) -> str:
    check_supported(target.backend, case, target.device)
    step = case.materialize(target.device, kv_written=False)
    _use_keys_as_queries(step)
    found = run_materialized_case(target.backend, step)
    keys, values = _own_tokens(case.materialize(target.device))
    sizes = (step.inputs.query[: len(keys)].double() * keys).abs().sum(-1) * step.params.scale
    assert found.lse is not None  # the case requests it
    for name, result, expected, size in (
        ("LSE", found.lse[: len(keys)], _scores(step, keys, torch.float64), sizes),
        ("output", found.out[: len(keys)], values, values.abs()),
    ):
        over = (result.double() - expected).abs() / size.clamp(min=1e-3)
        if not bool(over.max() <= FLOAT8_QUERY_STEP):
            return (
                f"queries that see their own key alone: relative error of the {name} "
                f"{float(over.max()):.3g}, at most {FLOAT8_QUERY_STEP} | case: {case}"
            )
    return ""


def _check_nan(target: BackendUnderTest, case: Case) -> str:
    """A NaN in the value of the last token is in its row; its scale is not replaced."""
    check_supported(target.backend, case, target.device)
    step = case.materialize(target.device, kv_written=False)
    step.inputs.value[-1, 0, 3] = math.nan
    out = run_materialized_case(target.backend, step).out
    group = case.num_heads // case.num_kv_heads
    if not bool(out[-1, :group, 3].isnan().all()):
        return f"the value of the only visible key is NaN, and the output is not | case: {case}"
    if bool(out[:-1].isnan().any()):
        return f"a NaN in a value reaches rows that do not see it | case: {case}"
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    fixed: dict[str, object] = {"batch": _BATCH, "sliding_window": 1}
    for name, fields in _CASES.items():
        case = target.case(**{**fixed, **fields})
        yield CheckCase(name, partial(_check, target, case, "scores" in name), case)
    size = target.base_case.head_size
    for name in PAGE_NAMES:
        fields = {
            "kv_cache_dtype": name,
            "layout": PAGE_LAYOUT_NAMES[0],
            "head_size": size if size % 32 == 0 else 64,
        }
        case = target.case(**{**fixed, "batch": "q1s37_q9s20"}, **fields)
        yield CheckCase(name, partial(_check, target, case, False), case)
        case = case.replace(batch="2q1s20")
        yield CheckCase(f"{name}-nan", partial(_check_nan, target, case), case)
    # Kernels may round the queries of long prompts only. Those are too slow on a CPU.
    batch = "q70s400_q33s200" if target.device.type == "cpu" else "q4500"
    case = target.case(**{**fixed, "batch": batch}, **_FLOAT8_QUERIES)
    yield CheckCase("float8_queries", partial(_check_float8_queries, target, case), case)


CHECKS = (Check("W5", "a query that sees one key returns its value", _cases),)
