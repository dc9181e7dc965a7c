"""Q7: scales of a float8 cache that are not valid count as NaN (M9).

Output rows that see a key through such a scale are NaN, and so is their LSE if it is the scale of
the keys. Rows of other heads, and those that see no key (M5), are those of the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.runner import AttentionOutput, compare_with_oracle, run_materialized_case

__all__ = ["CHECKS"]

_BATCHES = {"decode": "q1s37_q1s16_2q1s5", "prefill": "q23_q9s40"}
_WITHOUT_KEYS = "q3s1_q1s0_q1s9_q2s0"
"""Tokens before the first position, and requests without keys."""
_FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "soft_cap": {"logits_soft_cap": 5.0},
    "sinks": {"sinks": True},
    "batch_invariant": {"batch_invariant": True},
    "selected": {"key_selection": ("kv_head", 4, 2, 1)},
}


def _check(target: BackendUnderTest, case: Case, side: str, value: float) -> str:
    step = case.materialize(target.device)
    heads = case.num_kv_heads if case.kv_scale_kind == "head" else 1
    scale = torch.full((heads,), 0.5, device=target.device)
    scale[-1] = value
    group = case.num_heads // heads
    invalid = torch.zeros(case.num_heads, dtype=torch.bool, device=target.device)
    invalid[-group:] = True
    name, valid = f"{side}_scale", torch.full_like(scale, 0.5)

    def scaled(given: torch.Tensor) -> MaterializedCase:
        params = step.params
        if side == "k":
            return replace(step, params=replace(params, k_scale=given))
        return replace(step, params=replace(params, v_scale=given))

    found, clean = run_materialized_case(target.backend, scaled(scale)), scaled(valid)
    expected = clean.oracle()
    sees = torch.zeros(len(found.out), dtype=torch.bool, device=target.device)
    rows = torch.cat([mask.any(dim=1) for mask in expected.visible])
    sees[: len(rows)] = rows
    poisoned = sees[:, None] & invalid
    results = [("output", found.out)]
    if found.lse is not None and side == "k":
        results.append(("LSE", found.lse.unsqueeze(-1)))
    for quantity, result in results:
        wrong = (~result.isnan().all(-1) & poisoned).nonzero()
        if len(wrong):
            row, head = wrong[0].tolist()
            return (
                f"{name} of {value} counts as NaN (M9), but the {quantity} of row {row} and query "
                f"head {head}, which sees keys through it, is not NaN | case: {case}"
            )
    out = torch.where(poisoned[..., None], expected.out, found.out.double())
    lse = found.lse
    if lse is not None:
        lse = torch.where(poisoned & (side == "k"), expected.lse, lse.double())
    error = compare_with_oracle(case, AttentionOutput(out, lse), target.device, clean)
    return f"{name} of {value} for other rows: {error}" if error else ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    fields: dict[str, object] = {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5, "v_scale": 0.5}
    for kind in ("tensor", "head"):
        for phase, batch in _BATCHES.items():
            for side, value in (("k", torch.nan), ("v", torch.nan), ("k", 0.0), ("v", 2.0**101)):
                if value == value and (target.quick or phase == "prefill"):
                    continue
                case = target.case(batch=batch, kv_scale_kind=kind, **fields)
                check = partial(_check, target, case, side, value)
                yield CheckCase(f"{side}-{kind}-{phase}-{value:.2g}", check, case)
    for name, feature in _FEATURES.items():
        for side in ("k", "v"):
            kind = "tensor" if name == "plain" else "head"
            case = target.case(batch=_WITHOUT_KEYS, kv_scale_kind=kind, **fields, **feature)
            check = partial(_check, target, case, side, torch.nan)
            yield CheckCase(f"{side}-without-keys-{name}", check, case)


CHECKS = (Check("Q7", "invalid scales of float8 caches reach the rows that see them", _cases),)
