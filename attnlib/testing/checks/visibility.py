"""W2: the exact set of keys that each query sees.

All keys are equal, so that all visible keys have the same weight. The value of key k is one-hot at
k. The output of a query is then 1/n at the n visible keys and 0 elsewhere, which gives the visible
set without a tolerance. Values have fewer elements than the sequence has keys, so the check runs
once for every Dv keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.inputs import StepInputs
from attnlib.testing.layouts import write_slots
from attnlib.testing.oracle import visible_keys
from attnlib.testing.runner import check_least_product, run_materialized_case
from attnlib.testing.score_functions import SUITE

__all__ = ["CHECKS", "NAN_OUTPUT", "weights_of_output"]

NAN_OUTPUT = (
    "gives NaN, as unused memory holds: read no blocks but those of the block table (P3), and do "
    "not multiply elements past the sequence, not even by zero (P5)"
)


def weights_of_output(
    target: BackendUnderTest, case: Case, score: float = 0.0
) -> list[torch.Tensor]:
    """Per request [Hq, query_len, seq_len]: positive for the keys that each query head sees in the
    backend's output. All keys have the same score."""
    batch, dims = case.batch_spec, case.dimensions
    longest = max(batch.max_seq_len, 1)
    parts = []
    for first in range(0, longest, dims.head_size_v):

        def set_one_hot_values(inputs: StepInputs, first: int = first) -> None:
            level = _set_score(inputs, case, score)
            for request, seq_len in enumerate(batch.seq_lens):
                slots = inputs.placement.slots(request, 0, seq_len, dims.block_size)
                like: dict[str, Any] = {"dtype": dims.dtype, "device": inputs.query.device}
                shape = (seq_len, dims.num_kv_heads)
                keys = torch.full((*shape, dims.head_size), level, **like)
                values = torch.zeros(*shape, dims.head_size_v, **like)
                stop = min(first + dims.head_size_v, seq_len)
                for key in range(first, stop):
                    values[key, :, key - first] = 1.0
                write_slots(inputs.cache.key, slots, keys, 1.0)
                write_slots(inputs.cache.value, slots, values, 1.0)

        step = case.materialize(target.device).modify_inputs(set_one_hot_values)
        parts.append(run_materialized_case(target.backend, step).out)
    weights = torch.cat(parts, dim=2).transpose(0, 1).cpu()  # [Hq, T, >= longest]
    rows, found = 0, []
    for query_len, seq_len in batch.lengths:
        found.append(weights[:, rows : rows + query_len, :seq_len])
        rows += query_len
    return found


def _set_score(inputs: StepInputs, case: Case, score: float) -> float:
    """Set all elements of the queries to a number, and return that of the keys."""
    if score == 0.0:
        return 0.0
    level = math.sqrt(abs(score) / math.sqrt(case.head_size))
    inputs.query.fill_(math.copysign(level, score))
    return level


def _expected_masks(case: Case) -> list[torch.Tensor]:
    """Per request [Hq, query_len, seq_len] bool: the keys that the rules show."""
    params, batch, heads = case.oracle_params("cpu"), case.batch_spec, case.num_heads
    masks = []
    for request, (query_len, seq_len) in enumerate(batch.lengths):
        positions = seq_len - query_len + torch.arange(query_len)
        own = params.of_request(request, slice(0, 0))
        visible = visible_keys(positions, seq_len, own).expand(heads, query_len, seq_len)
        if own.score is not None:
            scores = torch.zeros(heads, query_len, seq_len)
            head = torch.arange(heads)[:, None, None]
            scores = own.score(scores, positions[:, None], torch.arange(seq_len), head)
            visible = visible & (scores > -math.inf)
        masks.append(visible)
    return masks


def _format_ranges(mask: torch.Tensor) -> str:
    """Of a mask of keys: true for 3, 4, 5 and 9 -> "3-5, 9"."""
    text = "".join("x" if is_true else "." for is_true in mask.tolist())
    spans = [(match.start(), match.end() - 1) for match in re.finditer("x+", text)]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "none"


def _compare(target: BackendUnderTest, case: Case, score: float) -> str:
    check_least_product(target.backend, case, score)
    weights, batch = weights_of_output(target, case, score), case.batch_spec
    for request, expected in enumerate(_expected_masks(case)):
        mask, nan = weights[request] > 0, weights[request].isnan()
        wrong = torch.nonzero(((mask != expected) | nan).any(dim=2))
        if not len(wrong):
            continue
        head, i = wrong[wrong[:, 1].argmin()].tolist()
        seen, right = mask[head, i], expected[head, i]
        query_len, seq_len = batch.query_lens[request], batch.seq_lens[request]
        others = len(wrong[wrong[:, 1] == i]) < case.num_heads
        found = f"sees keys {_format_ranges(seen)}; expected {_format_ranges(right)}"
        if nan[head, i].any():
            found = NAN_OUTPUT
        elif entry := _first_missing_block(seen, right, case.block_size):
            found += f": no key of block table entry {entry} and later ones (P3)"
        return (
            f"the query at position {seq_len - query_len + i} of request {request} (seq_len "
            f"{seq_len}, query_len {query_len}{f', head {head}' if others else ''}) {found} | "
            f"case: {case}"
        )
    return ""


def _first_missing_block(seen: torch.Tensor, right: torch.Tensor, block_size: int) -> int:
    """The entry of the block table from which on all keys are missing, and none before; else 0."""
    wrong = torch.nonzero(seen != right).flatten()
    first = int(wrong[0]) // block_size
    end = first * block_size
    is_cut = not seen[end:].any() and torch.equal(seen[:end], right[:end])
    return first if is_cut and right[end:].nonzero()[0] == 0 else 0


def _window_cases(target: BackendUnderTest) -> Iterator[tuple[str, Case]]:
    block = target.base_case.block_size
    windows = (1, 2, block - 1, block, block + 1)
    for window in (2, block) if target.quick else windows:
        edges = sorted({max(window - 1, 1), window, window + 1, 2 * block + 3})
        phases = {
            "decode": "_".join(f"q1s{edge}" for edge in edges),
            "verify": f"q4s{window + 4}_q4s{2 * block + 1}",
            "chunked": f"q9s{window + 11}_q10s{2 * block + 2}",
            "full": "_".join(f"q{edge}" for edge in edges),
        }
        for phase, batch in phases.items():
            yield f"window-{window}-{phase}", target.case(batch=batch, sliding_window=window)


def _mask_cases(target: BackendUnderTest) -> Iterator[tuple[str, Case]]:
    block = target.base_case.block_size
    batch = f"q1s{block + 2}_q4s{2 * block}_q11s{block + 3}_q{block + 1}"
    yield "causal", target.case(batch=batch)
    yield "bidirectional", target.case(batch=batch, mask="bidirectional")
    yield "per_request", target.case(batch=batch, mask="per_request")
    yield "two_sided", target.case(batch=batch, mask="bidirectional", sliding_window=3)
    yield "left_2_right_0", target.case(batch=batch, mask="bidirectional", window=(2, 0))
    yield "left_0_right_1", target.case(batch=batch, mask="bidirectional", window=(0, 1))
    yield "left_0", target.case(batch=batch, mask="bidirectional", window=(0, None))
    yield "causal-left_3", target.case(batch=batch, window=(3, None))
    yield "chunk", target.case(batch=batch, attention_chunk_size=block + 4)
    yield (
        "chunk_of_one-bidirectional",
        target.case(batch=batch, mask="bidirectional", attention_chunk_size=1),
    )
    yield "chunk_of_one_block", target.case(batch=batch, attention_chunk_size=block)
    yield "soft_cap", target.case(batch=batch, logits_soft_cap=2.0)
    yield "soft_cap-window", target.case(batch=batch, logits_soft_cap=2.0, sliding_window=5)
    for right in (0, 2):
        # Rows of which some see one key more or less than the first one.
        near = "_".join(f"q{right + more}s{block + 5}" for more in (1, 2, 3))
        window = {"mask": "bidirectional", "window": (None, right)}
        yield f"right_{right}", target.case(batch=f"{near}_q{block}", **window)
    finite = "attnlib.testing.score_functions:FINITE"  # shows keys that are hidden before it
    yield "score_function", target.case(batch=batch, score=finite)
    yield "loose_bounds", target.case(batch=batch, loose_bounds=True)
    yield "loose_bounds-window", target.case(batch=batch, loose_bounds=True, sliding_window=5)
    decodes = f"q1s{block + 2}_q1s{3 * block}_q1s1"
    yield "loose_bounds-decode", target.case(batch=decodes, loose_bounds=True)


def _score_cases(target: BackendUnderTest) -> Iterator[tuple[str, Case]]:
    """Masks of score functions, whose bounds let kernels skip keys."""
    block = target.base_case.block_size
    batch = f"q1s{block + 2}_q4s{2 * block}_q11s{block + 3}"
    for name in ("documents", "multi_item", "spans", "head_windows"):
        path, fields = SUITE[name]
        if name in ("multi_item", "head_windows") or not target.quick:
            yield name, target.case(batch=batch, score=path, **fields)


_LARGE = {"large-negative": -20000.0, "large": 20000.0}
"""Scores of all keys: exponentials of them overflow, and the negative one is below finite masks."""


def _visibility(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, case in (*_mask_cases(target), *_score_cases(target), *_window_cases(target)):
        case = case.replace(needs_lse=False)
        yield CheckCase(name, partial(_compare, target, case, 0.0), case)
    block = target.base_case.block_size
    batch = f"q1s{block + 2}_q11s{block + 3}"
    for name, score in _LARGE.items():
        for feature, fields in {"": {}, "-soft_cap": {"logits_soft_cap": 50.0}}.items():
            case = target.case(batch=batch, needs_lse=False, **fields)
            yield CheckCase(f"{name}{feature}", partial(_compare, target, case, score), case)


CHECKS = (Check("W2", "which keys each query sees", _visibility),)
