"""A3: attention by operations that no attention layer runs.

Each result is compared with the oracle: sequences that lie anywhere in the packed tokens
(`context_attention`), the packed cache of vLLM's PagedAttention (`packed_decode`,
`packed_prefill`), decodes whose keys are listed as segments (`shared_decode`), and the weights
after the softmax (`attention_scores`). Cases are unsupported where a backend has no such operation
(`AttentionBackend.get_operation`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.block_sparse import BlockSparsePattern
from attnlib.ops.params import AttentionParams
from attnlib.ops.shared_decode import Segment
from attnlib.ops.shared_decode_schedule import schedule_items
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.oracle import OracleResult, gather_tokens, unpaged_attention
from attnlib.testing.outcome import UnsupportedCase
from attnlib.testing.runner import AttentionOutput, compare_with_oracle, find_operation

__all__ = ["CHECKS"]


def _call(target: BackendUnderTest, name: str, *arguments: Any, **options: Any) -> Any:
    """Call an operation of the backend.

    Raises:
        UnsupportedCase: the backend does not have it, or refuses these arguments.
    """
    try:
        return find_operation(target.backend, name)(*arguments, **options)
    except UnsupportedConfigError as error:
        raise UnsupportedCase([str(error)]) from error


def _params(step: MaterializedCase) -> AttentionParams:
    """The parameters of a step, without explicit bias and score function."""
    params = step.params
    return AttentionParams(
        scale=params.scale, causal=params.causal, window=params.window,
        attention_chunk_size=params.attention_chunk_size, logits_soft_cap=params.logits_soft_cap,
        alibi_slopes=params.alibi_slopes, sinks=params.sinks, query_bias=params.query_bias,
        k_scale=params.k_scale, v_scale=params.v_scale,
    )  # fmt: skip


def _compare(
    found: torch.Tensor, oracle: Callable[[torch.dtype], torch.Tensor], case: Case, quantity: str
) -> str:
    """The error of a result; `oracle` computes it in a precision."""
    expected, plain = oracle(torch.float64), oracle(case.torch_dtype)
    compared = compare(found, expected, plain, case.torch_dtype, quantity)
    return "" if compared.passed else f"{compared} | case: {case}"


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
    _call(
        target, "context_attention", inputs.query, inputs.key, inputs.value, *device_lists,
        _params(step), max_seq_len=max(lengths) + 3, out=out,
    )  # fmt: skip
    untouched = torch.ones(rows, dtype=torch.bool, device=target.device)
    for start, length in zip(starts, lengths, strict=True):
        own = slice(start, start + length)
        untouched[own] = False
        ends = torch.tensor([0, length])
        tensors = (inputs.query[own], inputs.key[own], inputs.value[own], ends, ends, step.params)
        error = _compare(out[own], lambda p, t=tensors: unpaged_attention(*t, p).out, case, "out")
        if error:
            return f"sequence of {length} tokens from {start}: {error}"
    if not bool((out[untouched] == fill).all()):
        return f"rows of no sequence were written | case: {case}"
    return ""


def _packed(step: MaterializedCase) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache in the layout of `ops.packed_cache`."""
    key, value = step.inputs.cache.key, step.inputs.cache.value
    x = 16 // key.element_size()
    key = key.contiguous().view(*key.shape[:3], -1, x).permute(0, 2, 3, 1, 4)
    return key.contiguous(), value.permute(0, 2, 3, 1).contiguous()


def _striped(pattern: BlockSparsePattern, head: int, block: int, last: int) -> bool:
    """Whether a head sees a block, as `ops.block_sparse` specifies."""
    step, group = pattern.head_sliding_step, pattern.num_heads // pattern.num_kv_heads
    if step >= 0:
        offset = 1 + step * (pattern.tp_rank * pattern.num_heads + head)
    else:
        offset = 1 - step * (pattern.tp_rank * pattern.num_kv_heads + head // group)
    return block > last - pattern.local_blocks or (block + offset) % pattern.vert_stride == 0


def _check_packed_decode(
    target: BackendUnderTest, case: Case, stripes: tuple[int, ...] | None
) -> str:
    step = case.materialize(target.device)
    inputs, pattern = step.inputs, None
    if stripes is not None:
        pattern = BlockSparsePattern(*stripes[:4], case.num_heads, case.num_kv_heads, stripes[4])
        selected = tuple(
            torch.tensor(
                [
                    [[_striped(pattern, head, key // pattern.block_size,
                               (length - 1) // pattern.block_size) for key in range(length)]]
                    for head in range(case.num_heads)
                ], device=target.device,
            )
            for length in inputs.batch.seq_lens
        )  # fmt: skip
        step = replace(step, params=replace(step.params, selected=selected))
    out = torch.full_like(inputs.query, torch.nan)
    _call(
        target, "packed_decode", inputs.query, *_packed(step), inputs.block_table,
        inputs.seq_lens, _params(step), max_seq_len=inputs.batch.max_seq_len + 5, out=out,
        pattern=pattern,
    )  # fmt: skip
    return compare_with_oracle(case, AttentionOutput(out, None), target.device, step)


def _check_packed_prefill(target: BackendUnderTest, case: Case) -> str:
    """New keys and values are used as given: they are not in the cache, and have no scale."""
    step = case.materialize(target.device, kv_written=False)
    inputs, batch = step.inputs, step.inputs.batch
    out = torch.full_like(inputs.query, torch.nan)
    _call(
        target, "packed_prefill", inputs.query, inputs.key, inputs.value, *_packed(step),
        inputs.block_table, inputs.query_start_loc, inputs.seq_lens, _params(step),
        max_query_len=batch.max_query_len, out=out,
    )  # fmt: skip

    def with_context(request: int, view: torch.Tensor, new: torch.Tensor, scale: Any) -> Any:
        length = batch.seq_lens[request] - batch.query_lens[request]
        old = gather_tokens(view, inputs.block_table[request], length).double()
        factor = torch.as_tensor(scale, device=old.device).expand(old.shape[1]).double()
        return torch.cat([old * factor[:, None], new.double()])

    plain, starts = replace(step.params, k_scale=1.0, v_scale=1.0), inputs.query_start_loc.tolist()
    for request in range(batch.num_reqs):
        own = slice(starts[request], starts[request + 1])
        key = with_context(request, inputs.cache.key, inputs.key[own], step.params.k_scale)
        value = with_context(request, inputs.cache.value, inputs.value[own], step.params.v_scale)
        ends = [torch.tensor([0, n]) for n in (own.stop - own.start, len(key))]
        tensors = (inputs.query[own], key, value, *ends, plain.of_request(request, own))
        error = _compare(out[own], lambda p, t=tensors: unpaged_attention(*t, p).out, case, "out")
        if error:
            return f"request {request}: {error}"
    if bool(out[batch.num_actual_tokens :].any()):
        return f"padding rows must be exactly 0 (M6) | case: {case}"
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
    served = _call(
        target, "shared_decode", inputs.query, inputs.cache.key, inputs.cache.value,
        inputs.block_table, items.to_device(target.device), _params(step), out=out, lse=lse,
    )  # fmt: skip
    if not served:
        raise UnsupportedCase(["shared_decode: not supported for these tensors"])

    def oracle(precision: torch.dtype) -> OracleResult:
        return _of_segments(step, segments, precision)

    error = _compare(out, lambda precision: oracle(precision).out, case, "out")
    if lse is not None and not error:
        error = _compare(lse, lambda precision: oracle(precision).lse, case, "lse")
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
    found = _call(
        target, "attention_scores", inputs.query, inputs.cache.key, inputs.cache.value,
        inputs.block_table, inputs.query_start_loc, inputs.seq_lens, _params(step),
    )  # fmt: skip
    expected, plain = step.oracle().weights, step.oracle(case.torch_dtype).weights
    if len(found) != len(expected):
        return f"{len(found)} tensors of weights for {len(expected)} requests | case: {case}"
    for request, results in enumerate(zip(found, expected, plain, strict=True)):
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
_PACKED_DECODES: dict[str, tuple[dict[str, object], tuple[int, ...] | None]] = {
    "plain": ({}, None),
    "alibi": ({"alibi": True, "scale": 0.3}, None),
    "fp8": ({"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5, "v_scale": 2.0}, None),
    "fp8-heads": (
        {"kv_cache_dtype": "fp8_e4m3", "kv_scale_kind": "head", "k_scale": 0.5, "v_scale": 2.0},
        None,
    ),
    "stripes": ({}, (1, 3, 16, 0, 0)),
    "stripes-of-heads": ({"alibi": True}, (2, 4, 32, 1, 2)),
    "stripes-of-kv-heads": (
        {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5, "v_scale": 0.25}, (1, 3, 16, -2, 1),
    ),
}  # fmt: skip
"""Name -> fields of the case; local blocks, stride, block size and step of a pattern, and rank."""
_PACKED_PREFILLS: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"sliding_window": 9},
    "alibi": {"alibi": True, "scale": 0.3},
    "no-context": {"batch": "q9_q17_q1"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5, "v_scale": 2.0},
    "fp8-heads": {
        "kv_cache_dtype": "fp8_e4m3", "kv_scale_kind": "head", "k_scale": 0.5, "v_scale": 2.0,
    },
}  # fmt: skip
_SCORES: dict[str, dict[str, object]] = {
    "mixed": {},
    "window": {"sliding_window": 7},
    "sinks+cap": {"sinks": True, "logits_soft_cap": 3.0},
    "alibi": {"alibi": True},
    "tree": {"mask": "query_bias", "batch": "q5s40_q3s9"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "kv_scale_kind": "head", "k_scale": 0.5, "v_scale": 2.0},
}


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    def named(name: str, run: Callable[..., str], *options: object, **fields: object) -> CheckCase:
        # Naming the head size and layout keeps layers over latents out.
        sizes = {"head_size": target.base_case.head_size, "layout": "NHD", "needs_lse": False}
        case = target.case(**{**sizes, **fields})
        return CheckCase(name, partial(run, target, case, *options), case)

    for name, fields in _CONTEXT_FEATURES.items():
        yield named(f"context-{name}", _check_context, "gaps", **fields)
    for form in ("packed", "long"):
        yield named(f"context-{form}", _check_context, form)
    for name, (fields, stripes) in _PACKED_DECODES.items():
        fields = {"batch": "q1s100_q1s1_q1s16_q1s37", **fields}
        yield named(f"packed-decode-{name}", _check_packed_decode, stripes, **fields)
    for name, fields in _PACKED_PREFILLS.items():
        fields = {"batch": "q5s40_q7_q1s16_q3s33_pad2", **fields}
        yield named(f"packed-prefill-{name}", _check_packed_prefill, **fields)
    for name, form in _PREFIXES.items():
        yield named(f"shared-{name}", _check_shared, form, needs_lse=name != "one-range")
    for feature in ({"sinks": True}, {"logits_soft_cap": 3.0, "scale": 0.5}):
        form = _PREFIXES["two-levels"]
        yield named(f"shared-{next(iter(feature))}", _check_shared, form, **feature)
    for name, fields in _SCORES.items():
        fields = {"batch": "q1s37_q9s20_q0s5_q4_pad2", **fields}
        yield named(f"scores-{name}", _check_scores, **fields)


CHECKS = (Check("A3", "attention outside of layers", _cases),)
