"""A3: attention by operations that no attention layer runs.

Each result is compared with the oracle: sequences that lie anywhere in the packed tokens
(`context_attention`), decodes whose keys are listed as segments (`shared_decode`), and the weights
after the softmax (`attention_scores`). Cases are unsupported where a backend has no such operation
(`AttentionBackend.get_operation`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from attnlib.ops.shared_decode import Segment
from attnlib.ops.shared_decode_schedule import schedule_items
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.operation_calls import (
    call_operation,
    compare_results,
    compare_sequence,
    operation_case,
    operation_params,
)
from attnlib.testing.oracle import OracleResult, gather_tokens, unpaged_attention
from attnlib.testing.outcome import UnsupportedCase

__all__ = ["CHECKS"]


_CONTEXTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "gaps": ((30, 2, 60, 15), (20, 11, 0, 1)),
    "packed": ((0, 7, 40), (7, 33, 24)),
    "long": ((5,), (150,)),
}
"""Name -> first token and number of tokens of each sequence."""


def _check_context(target: BackendUnderTest, case: Case, form: str) -> str:
    starts, lengths = _CONTEXTS[form]
    rows = max(start + length for start, length in zip(starts, lengths, strict=True)) + 4
    step = case.replace(batch=f"q{rows}").materialize(target.device)
    inputs, fill = step.inputs, 7.0
    out = torch.full_like(inputs.query, fill)
    device_lists = (
        torch.tensor(numbers, dtype=torch.int32, device=target.device)
        for numbers in (starts, lengths)
    )
    call_operation(
        target,
        "context_attention",
        inputs.query,
        inputs.key,
        inputs.value,
        *device_lists,
        operation_params(step),
        max_seq_len=max(lengths) + 3,
        out=out,
    )
    untouched = torch.ones(rows, dtype=torch.bool, device=target.device)
    for start, length in zip(starts, lengths, strict=True):
        own = slice(start, start + length)
        untouched[own] = False
        tensors = (out[own], inputs.query[own], inputs.key[own], inputs.value[own])
        if error := compare_sequence(*tensors, step.params, case):
            return f"sequence of {length} tokens from {start}: {error}"
    if not bool((out[untouched] == fill).all()):
        return f"rows of no sequence were written | case: {case}"
    return ""


@dataclass(frozen=True)
class _Prefixes:
    """Segments of a decode and their division over ranges of tiles.

    Attributes:
        tokens: query tokens.
        levels: keys of each shared prefix, and how many tokens share it.
        tile_keys, ranges: keys of a tile, and ranges of the tiles.
        own: each token has keys of its own with this probability.
    """

    tokens: int
    levels: tuple[tuple[int, int], ...]
    tile_keys: int
    ranges: int
    own: float = 1.0

    def segments(self, block_size: int, seed: int) -> list[Segment]:
        """Prefixes from position 0 on, one behind the other, and the other keys of each token."""
        draw, found, start = random.Random(seed), [], 0
        for keys, members in self.levels:
            for first in range(0, self.tokens, members):
                tokens = tuple(range(first, min(first + members, self.tokens)))
                if len(tokens) > 1:
                    found.append(Segment(first, start, keys, tokens))
            start += -(-keys // block_size) * block_size
        for token in range(self.tokens):
            if draw.random() < self.own:
                found.append(Segment(token, start, draw.randint(1, 40), (token,)))
        return found


_PREFIXES = {
    "two-levels": _Prefixes(7, ((64, 7), (32, 3)), 16, 3),
    "many-ranges": _Prefixes(5, ((96, 5),), 8, 20),
    "one-range": _Prefixes(9, ((48, 4),), 32, 1, own=0.6),
    "many-tokens": _Prefixes(40, ((64, 40),), 16, 5),
    "no-prefix": _Prefixes(4, (), 16, 2, own=0.7),
}


def _check_shared(target: BackendUnderTest, case: Case, form: _Prefixes) -> str:
    segments = form.segments(case.block_size, case.seed)
    longest = max(segment.start + segment.keys for segment in segments)
    step = case.replace(batch=f"{form.tokens}q1s{longest}_pad2").materialize(target.device)
    inputs, group = step.inputs, case.num_heads // case.num_kv_heads
    items = schedule_items(
        segments, form.tokens, group, case.block_size, form.tile_keys, form.ranges
    )
    out = torch.full_like(inputs.out, torch.nan)
    lse = torch.full(out.shape[:2], torch.nan, device=target.device) if case.needs_lse else None
    served = call_operation(
        target,
        "shared_decode",
        inputs.query,
        inputs.cache.key,
        inputs.cache.value,
        inputs.block_table,
        items.to_device(target.device),
        operation_params(step),
        out=out,
        lse=lse,
    )
    if not served:
        if not bool(out.isnan().all()):
            return f"False means that the tensors are not served, but out is written | case: {case}"
        raise UnsupportedCase(["shared_decode: not supported for these tensors"])

    def oracle(precision: torch.dtype) -> OracleResult:
        return _of_segments(step, segments, precision)

    error = compare_results(out, lambda precision: oracle(precision).out, case, "out")
    if lse is not None and not error:
        error = compare_results(lse, lambda precision: oracle(precision).lse, case, "lse")
    return f"{error}, {form}" if error else ""


def _of_segments(
    step: MaterializedCase, segments: list[Segment], precision: torch.dtype
) -> OracleResult:
    """Attention of each token over the keys of all its segments."""
    inputs, size = step.inputs, step.case.block_size
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    counts = []
    for token in range(inputs.query.shape[0]):
        own = [segment for segment in segments if token in segment.tokens]
        for segment in own:
            row = inputs.block_table[segment.request, segment.start // size :]
            keys.append(gather_tokens(inputs.cache.key, row, segment.keys))
            values.append(gather_tokens(inputs.cache.value, row, segment.keys))
        counts.append(sum(segment.keys for segment in own))
    ends = torch.tensor([0, *counts]).cumsum(0)
    starts = torch.arange(len(counts) + 1)
    params = replace(step.params, causal=False)
    found = unpaged_attention(
        inputs.query, torch.cat(keys), torch.cat(values), starts, ends, params, precision
    )
    padding = slice(step.case.batch_spec.num_actual_tokens, None)
    found.out[padding] = 0.0  # M6: rows without a request have no sink, either
    found.lse[padding] = -torch.inf
    return found


def _check_scores(target: BackendUnderTest, case: Case) -> str:
    step = case.materialize(target.device)
    inputs = step.inputs
    found = call_operation(
        target,
        "attention_scores",
        inputs.query,
        inputs.cache.key,
        inputs.cache.value,
        inputs.block_table,
        inputs.query_start_loc,
        inputs.seq_lens,
        operation_params(step),
    )
    expected, plain = step.oracle().weights, step.oracle(case.torch_dtype).weights
    if len(found) != len(expected):
        return f"{len(found)} tensors of weights for {len(expected)} requests | case: {case}"
    for request, results in enumerate(zip(found, expected, plain, strict=True)):
        given = results[0]
        if given.dtype != torch.float32 or given.shape != results[1].shape:
            return (
                f"the weights of request {request} are {tuple(given.shape)} of {given.dtype}; they "
                f"must be {tuple(results[1].shape)} of float32 | case: {case}"
            )
        compared = compare(*results, case.torch_dtype, "out")
        if not compared.passed:
            return f"weights of request {request}: {compared} | case: {case}"
        if bool(results[0][results[1] == 0].any()):
            return f"hidden keys of request {request} have a weight | case: {case}"
    return ""


_CONTEXT_FEATURES: dict[str, dict[str, object]] = {
    "causal": {},
    "bidirectional": {"mask": "bidirectional"},
    "window": {"sliding_window": 4},
    "two-sided-window": {"mask": "bidirectional", "window": (2, 5)},
    "scale": {"scale": 0.9},
}
_SCORES: dict[str, dict[str, object]] = {
    "mixed": {},
    "window": {"sliding_window": 7},
    "sinks+cap": {"sinks": True, "logits_soft_cap": 3.0},
    "alibi": {"alibi": True},
    "float16": {"dtype": "float16"},
    "tree": {"mask": "query_bias", "batch": "q5s40_q3s9"},
    "score-function": {"score": "attnlib.testing.score_functions:POSITIONS", "sliding_window": 11},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "kv_scale_kind": "head", "k_scale": 0.5, "v_scale": 2.0},
}


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    def named(name: str, run: Callable[..., str], *options: object, **fields: object) -> CheckCase:
        case = operation_case(target, **fields)
        return CheckCase(name, partial(run, target, case, *options), case)

    for name, fields in _CONTEXT_FEATURES.items():
        yield named(f"context-{name}", _check_context, "gaps", **fields)
    for form in ("packed", "long"):
        yield named(f"context-{form}", _check_context, form)
    for name, prefixes in _PREFIXES.items():
        yield named(f"shared-{name}", _check_shared, prefixes, needs_lse=name != "one-range")
    prefixes = _PREFIXES["two-levels"]
    yield named("shared-sinks", _check_shared, prefixes, sinks=True)
    yield named("shared-soft-cap", _check_shared, prefixes, logits_soft_cap=3.0, scale=0.5)
    wrong = {"garbage": "huge", "extra_columns": 3}  # entries past the segments are not read (P3)
    yield named("shared-wrong-ids", _check_shared, prefixes, **wrong)
    for dtype in ("float16", "bfloat16"):
        yield named(f"shared-{dtype}", _check_shared, prefixes, dtype=dtype)
    for name, fields in _SCORES.items():
        fields = {"batch": "q1s37_q9s20_q0s5_q4_pad2", **fields}
        yield named(f"scores-{name}", _check_scores, **fields)


CHECKS = (Check("A3", "attention outside of layers", _cases),)
