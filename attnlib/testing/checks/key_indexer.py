"""I1: the indexer selects the keys with the largest scores (M14).

Queries, keys, weights and scales are small integers, so that scores are exact in every precision
and often equal: the lists are compared without a tolerance. Keys outside of all sequences hold NaN.
Cases are unsupported where a backend has no operation `select_keys`
(`AttentionBackend.get_operation`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import find_operation

__all__ = ["CHECKS"]

_BATCH = "q1s37_q5s20_q7_q0s3_q1s1_pad2"


@dataclass(frozen=True)
class _Form:
    """What a case varies.

    Attributes:
        block_size, max_blocks: of the lists.
        weighted: index heads have weights and share one list.
        local_blocks: blocks up to the query's own that are always selected.
        float8: the index keys are e4m3 with a scale for each token.
        nans: some visible keys are NaN.
        batch: the request lengths.
        heads, size: index heads and their elements.
    """

    block_size: int = 1
    max_blocks: int = 6
    weighted: bool = True
    local_blocks: int = 0
    float8: bool = False
    nans: bool = False
    batch: str = _BATCH
    heads: int = 3
    size: int = 32


_FORMS = {
    "tokens": _Form(),
    "tokens-fp8": _Form(float8=True, heads=4),
    "nan-keys": _Form(nans=True, max_blocks=30),
    "list-per-head": _Form(weighted=False, heads=2),
    "blocks": _Form(block_size=4, max_blocks=3, weighted=False),
    "blocks-local": _Form(block_size=3, max_blocks=4, local_blocks=2),
    "blocks-local-fp8": _Form(block_size=4, max_blocks=3, local_blocks=1, float8=True),
    "blocks-of-128": _Form(
        block_size=128, max_blocks=2, weighted=False, local_blocks=1, batch="q1s600_q2s411"
    ),
    "longer-than-keys": _Form(max_blocks=50),
    "many-scores": _Form(batch="q1s40_q230s600", heads=128, size=8, max_blocks=12),
    "odd-size": _Form(heads=5, size=24, max_blocks=9),
}
_QUICK = ("tokens-fp8", "nan-keys", "blocks-local", "many-scores")


def _scores(query: torch.Tensor, weights: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
    """Scores [H, S] of one query `[Hi, Di]`, in float64."""
    scores = query @ keys.T
    if weights is None:
        return scores
    return (scores.clamp(min=0) * weights[:, None]).sum(0, keepdim=True)


def _best(scores: list[float], form: _Form, position: int) -> list[int]:
    """The list of one query and head, block by block."""
    own = position // form.block_size
    blocks = []
    for block in range(own + 1):
        first = block * form.block_size
        seen = scores[first : min(first + form.block_size, position + 1)]
        best = max((-math.inf if math.isnan(score) else score) for score in seen)
        blocks.append(math.inf if block > own - form.local_blocks else best)
    chosen = sorted(range(own + 1), key=lambda block: (-blocks[block], block))[: form.max_blocks]
    return sorted(chosen) + [-1] * (form.max_blocks - len(chosen))


def _check(target: BackendUnderTest, case: Case, form: _Form) -> str:
    select_keys = find_operation(target.backend, "select_keys")
    step = case.materialize(target.device)
    batch, placement = step.inputs.batch, step.inputs.placement
    draw = torch.Generator().manual_seed(case.seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw).double()

    rows = batch.num_tokens
    query = integers(-2, 3, rows, form.heads, form.size)
    query[::3, 0] = 0.0  # sums of 0 and -0
    weights = integers(-1, 3, rows, form.heads) if form.weighted else None
    keys = torch.full((placement.num_blocks, case.block_size, form.size), torch.nan).double()
    scales = torch.full(keys.shape[:2], torch.nan).double()
    expected = torch.full((rows, 1 if form.weighted else form.heads, form.max_blocks), -1).int()
    row = 0
    for request, (query_len, seq_len) in enumerate(batch.lengths):
        own = integers(-1, 2, seq_len, form.size)
        factors = 2.0 ** integers(-1, 2, seq_len)
        if form.nans:
            own[1::5, 3] = torch.nan
        slots = torch.tensor(placement.slots(request, 0, seq_len, case.block_size)).long()
        at = slots // case.block_size, slots % case.block_size
        keys[at], scales[at] = own, factors
        real = own * factors[:, None] if form.float8 else own
        for position in range(seq_len - query_len, seq_len):
            found = _scores(query[row], None if weights is None else weights[row], real)
            lists = [_best(scores, form, position) for scores in found.tolist()]
            expected[row] = torch.tensor(lists)
            row += 1
    stored = torch.float8_e4m3fn if form.float8 else case.torch_dtype
    arguments = (
        query.to(target.device, case.torch_dtype),
        None if weights is None else weights.to(target.device, torch.float32),
        keys.to(stored).to(target.device),
        scales.to(target.device, torch.float32) if form.float8 else None,
        step.inputs.block_table,
        step.inputs.query_start_loc,
        step.inputs.seq_lens,
        step.spec.key_selection,
    )
    for fill in (7, -3):  # the second call must give the same lists
        out = torch.full_like(expected, fill, device=target.device)
        select_keys(
            *arguments,
            local_blocks=form.local_blocks,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len + 3,
            out=out,
        )
        wrong = (out.cpu() != expected).any(-1).nonzero()
        if len(wrong):
            token, head = wrong[0].tolist()
            return (
                f"{len(wrong)} lists are wrong, first that of row {token} and head {head}: "
                f"{out[token, head].tolist()} where {expected[token, head].tolist()} was expected "
                f"(M14) | case: {form}, {case}"
            )
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    named: dict[str, tuple[_Form, dict[str, object]]] = {
        name: (form, {}) for name, form in _FORMS.items() if not target.quick or name in _QUICK
    }
    for dtype in () if target.quick else ("float16", "bfloat16"):
        for name in ("tokens", "blocks-local-fp8"):
            named[f"{name}-{dtype}"] = _FORMS[name], {"dtype": dtype}
    # Entries past a sequence are not read (P3).
    named["wrong-ids"] = _FORMS["blocks-local"], {"garbage": "huge", "extra_columns": 3}
    for name, (form, fields) in named.items():
        scope = "all_heads" if form.weighted else "kv_head"
        selection = (scope, form.block_size, form.max_blocks, 1)
        case = target.case(batch=form.batch, key_selection=selection, **fields)
        yield CheckCase(name, partial(_check, target, case, form), case)


CHECKS = (Check("I1", "the indexer selects the keys with the largest scores", _cases),)
