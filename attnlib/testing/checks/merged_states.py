"""L4: operations that merge states of attention over disjoint keys.

`merge_states` merges two states, `merge_partial_rows` any number into each token's own. States
without keys hold NaN, and their LSE is -inf or +inf. Results are compared with a sum in float64.
Cases are unsupported where a backend has no such operation (`AttentionBackend.get_operation`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import find_operation

__all__ = ["CHECKS"]

_HEADS = 3
_State = tuple[torch.Tensor, torch.Tensor]
"""Output `[n, Hq, Dv]` and LSE `[n, Hq]`."""


def _states(count: int, case: Case, draw: torch.Generator, empty: list[tuple[int, int]]) -> _State:
    """Random states; those in `empty`, as (row, head), have no keys."""
    out = torch.randn(count, _HEADS, case.head_size, generator=draw).to(case.torch_dtype)
    lse = torch.randn(count, _HEADS, generator=draw) * 4.0
    lse[::3] += 50.0  # exp overflows float16
    lse[1::5] -= 120.0  # exp underflows float32
    for place, (row, head) in enumerate(empty):
        out[row, head] = torch.nan
        lse[row, head] = -math.inf if place % 2 == 0 else math.inf
    return out, lse


def _merged(states: list[_State], precision: torch.dtype) -> _State:
    """One state of `[n, Hq]` states of the same rows, computed in `precision`."""
    logs = torch.stack([lse for _, lse in states]).double()
    logs = logs.masked_fill(logs == math.inf, -math.inf)
    total = logs.logsumexp(0)
    weights = (logs - total.masked_fill(total == -math.inf, 0.0)).exp().to(precision)
    result = torch.zeros_like(states[0][0], dtype=precision)
    for (out, _), weight in zip(states, weights, strict=True):
        values = out.to(precision).masked_fill((weight == 0)[..., None], 0.0)
        result = result + weight[..., None] * values
    return result, total


def _difference(actual: _State, states: list[_State], dtype: torch.dtype) -> str:
    """The first error of merged states; "" if there is none."""
    expected, same = _merged(states, torch.float64), _merged(states, dtype)
    for quantity, found, want, plain in zip(("out", "lse"), actual, expected, same, strict=True):
        compared = compare(found.cpu(), want, plain, dtype, quantity)
        if not compared.passed:
            return str(compared)
    return ""


def _check_pair(target: BackendUnderTest, case: Case, form: str) -> str:
    merge = find_operation(target.backend, "merge_states")
    draw = torch.Generator().manual_seed(case.seed)
    empty_a, empty_b = [(0, 0), (1, 2), (4, 1), (5, 0)], [(2, 1), (3, 0), (4, 1), (5, 0)]
    states = [_states(9, case, draw, empty) for empty in (empty_a, empty_b)]
    (out_a, lse_a), (out_b, lse_b) = (
        [x.clone().to(target.device) for x in state] for state in states
    )
    out, lse = torch.full_like(out_a, torch.nan), torch.full_like(lse_a, torch.nan)
    if form == "into-a":
        out, lse = out_a, lse_a
    elif form == "into-b":
        out, lse = out_b, lse_b
    merge(out_a, lse_a, out_b, lse_b, out, None if form == "no-lse" else lse)
    if form == "no-lse":
        lse = _merged(states, torch.float64)[1].float()
    error = _difference((out, lse), states, case.torch_dtype)
    return f"{error} (M5) | case: {form}, {case}" if error else ""


_PARTS: dict[str, list[int]] = {
    "some": [2, 0, 1, 3, 0, 1],
    "many": [11, 1, 0, 17, 8, 9],
    "one": [0, 0, 0, 1, 0, 0],
    "none": [0, 0, 0, 0, 0, 0],
}
"""Name -> partial states of each token."""


def _check_rows(target: BackendUnderTest, case: Case, form: str) -> str:
    merge = find_operation(target.backend, "merge_partial_rows")
    draw, counts = torch.Generator().manual_seed(case.seed), _PARTS[form]
    # A token without entries keeps its state, so its own state is one of at least one key.
    empty = [(token, token % _HEADS) for token, count in enumerate(counts) if count]
    own = _states(len(counts), case, draw, empty)
    total = sum(counts)
    parts = _states(total + 4, case, draw, [(row, row % 3) for row in range(0, total + 4, 4)])
    rows = torch.randperm(total + 4, generator=draw)[:total].int()
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    actual = tuple(x.clone().to(target.device) for x in own)
    given = [x.to(target.device) for x in (*parts, starts)]
    # Entries past the last token are not read.
    entries = torch.cat([rows, rows.new_full((3,), 2**30)]).to(target.device)
    merge(*actual, *given, entries)
    for token in range(len(counts)):
        found = rows[starts[token] : starts[token + 1]].long()
        states = [(own[0][token : token + 1], own[1][token : token + 1])]
        states += [(parts[0][row][None], parts[1][row][None]) for row in found]
        result = (actual[0][token : token + 1], actual[1][token : token + 1])
        if error := _difference(result, states, case.torch_dtype):
            return f"token {token}, {len(found)} partial states: {error} | case: {case}"
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    # The LSE is float32 also with float64 outputs, and weights are float64.
    dtypes = (target.base_case.dtype, "float16", "float64")
    for dtype in dict.fromkeys(dtypes):
        case = target.case(dtype=dtype)
        for form in ("apart", "into-a", "into-b", "no-lse"):
            if dtype == dtypes[0] or form == "apart":
                yield CheckCase(
                    f"pair-{form}-{dtype}", partial(_check_pair, target, case, form), case
                )
        for form in _PARTS if dtype == dtypes[0] else ("some",):
            yield CheckCase(f"rows-{form}-{dtype}", partial(_check_rows, target, case, form), case)


CHECKS = (Check("L4", "merged states of disjoint keys", _cases),)
