"""L5: the share of the sink beside keys of equal weight.

All keys are zero, so that each visible key has the score 0, and all values are 1 (latents are both:
then the queries are zero). A query that sees n keys then returns n / (n + exp(sink)), and its LSE
is log(n + exp(sink)). The keys are counted: visible ones, those that lists select, and compressed
entries. A sink that counts twice, in each stream or not at all gives another share, and so do keys
that are hidden or shown by mistake. With tensors of query tokens (M21, M22) each token has its own
sink, and a bias b that makes the share n / (n + exp(sink - b)).
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
from attnlib.testing.checks.compressed_entries import attend_to_both
from attnlib.testing.checks.query_tensors import call_twice
from attnlib.testing.compressed_entries import Entries, expected_result, make_entries
from attnlib.testing.inputs import StepInputs
from attnlib.testing.layouts import write_slots
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.oracle import visible_keys
from attnlib.testing.runner import check_supported, run_materialized_case

__all__ = ["CHECKS"]

_CASES: dict[str, dict[str, object]] = {
    "decode": {"batch": "decode"},
    "mixed": {"batch": "mixed"},
    "splits": {"batch": "q1s900_q1s7_q4s300"},
    "window": {"batch": "chunked", "sliding_window": 13},
    "soft_cap": {"batch": "mixed", "logits_soft_cap": 3.0},
    "disabled": {"batch": "mixed", "disabled_sinks": True},
    "selected-tokens": {"batch": "mixed", "key_selection": ("all_heads", 1, 20, 1)},
    "selected-blocks": {"batch": "q1s90_q5s44_q2s2", "key_selection": ("kv_head", 16, 3, 1)},
    "selected-splits": {"batch": "q1s600_q2s411", "key_selection": ("all_heads", 2, 200, 1)},
    "entries": {"batch": "q1s90_q19s44_q2s2_q40", "compressed": (4, 8, 0), "sliding_window": 13},
    "selected-entries": {"batch": "q1s37_q4s80", "compressed": (4, 8, 5)},
}


_QUERY_TOKENS = ("q1s50_q9s44_q2s2_q20", "q1s300_q1s7_q4s200")
"""Batches with tensors of query tokens."""


def _fill(inputs: StepInputs) -> None:
    """Write keys of 0 and values of 1."""
    dims = inputs.dims
    for request, seq_len in enumerate(inputs.batch.seq_lens):
        slots = inputs.placement.slots(request, 0, seq_len, dims.block_size)
        for view, number in ((inputs.cache.key, 0.0), (inputs.cache.value, 1.0)):
            shape = (seq_len, *view.shape[2:])
            tokens = torch.full(shape, number, dtype=dims.dtype, device=view.device)
            write_slots(view, slots, tokens, 1.0)


def _fill_entries(entries: Entries) -> None:
    """Write entries of 0 with values of 1 where a query sees them."""
    cache = entries.cache
    for request, mask in enumerate(entries.masks):
        seen = mask.any(dim=0).nonzero()[:, 0].tolist()
        row = entries.block_table[request].tolist()
        size = cache.block_size
        slots = [row[entry // size] * size + entry % size for entry in seen]
        for view, number in ((cache.key_cache, 0.0), (cache.value_cache, 1.0)):
            tokens = torch.full((len(slots), *view.shape[2:]), number, device=view.device)
            write_slots(view, slots, tokens.to(view.dtype), 1.0)


def _counts(step: MaterializedCase, entries: Entries | None) -> torch.Tensor:
    """[T, Hq] float64: the keys and entries that each query and head sees."""
    case, params = step.case, step.params
    batch, found = case.batch_spec, []
    for request, (query_len, seq_len) in enumerate(batch.lengths):
        positions = seq_len - query_len + torch.arange(query_len)
        seen = visible_keys(positions, seq_len, params.of_request(request, slice(0, 0)))
        seen = seen.expand(case.num_heads, query_len, seq_len)
        if params.selected is not None:
            seen = seen & params.selected[request].cpu()
        count = seen.double().sum(-1)
        if entries is not None:
            count = count + entries.masks[request].double().sum(-1)
        found.append(count.T)
    return torch.cat(found)


def _check(target: BackendUnderTest, case: Case) -> str:
    check_supported(target.backend, case, target.device)
    step = case.materialize(target.device).modify_inputs(_fill)
    if case.use_mla:
        step.inputs.query.zero_()
    entries = None
    if case.token_sinks:
        found = call_twice(target, step)
    elif case.compressed is None:
        found = run_materialized_case(target.backend, step)
    else:
        entries = make_entries(step, target.device)
        _fill_entries(entries)
        found = attend_to_both(target.backend, step, entries)
    counts = _counts(step, entries)
    assert step.params.sinks is not None  # all cases have sinks
    sinks = step.params.sinks.double().cpu()
    bias = torch.zeros_like(counts)
    if case.token_sinks:
        given = step.query_tensors()
        assert given is not None
        sinks, bias = sinks[: len(counts)], given.tensors["bias"][: len(counts)].double().cpu()
    total = counts + (sinks - bias).exp()
    share = (counts / total.clamp(min=1e-300))[..., None].expand(-1, -1, found.out.shape[2])
    out, dtype = found.out[: len(share)].cpu(), case.torch_dtype
    if entries is None:
        rounded = step.oracle(dtype).out
    else:
        rounded, _ = expected_result(step, entries, dtype)
    comparisons = [compare(out, share, rounded[: len(share)].cpu(), dtype)]
    if found.lse is not None:
        # Scores of 0 have no rounding error, but kernels for 16 bits may have exponentials of 16.
        lse, expected = found.lse[: len(share)].cpu(), total.log() + bias
        comparisons.append(compare(lse, expected, expected.to(dtype), dtype, "lse"))
    errors = [str(comparison) for comparison in comparisons if not comparison.passed]
    if not errors:
        return ""
    off = (out.double() - share).abs().amax(-1).nan_to_num(math.inf)
    token, head = divmod(int(off.argmax()), off.shape[1])
    return (
        f"row {token}, head {head}: {int(counts[token, head])} keys of score 0 and a sink of "
        f"{float((sinks - bias)[token, head]):.3g} give the keys the weight "
        f"{float(out[token, head, 0]):.6g}; expected {float(share[token, head, 0]):.6g} | "
        f"{'; '.join(errors)} | case: {case}"
    )


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, fields in _CASES.items():
        case = target.case(sinks=True, **fields)
        yield CheckCase(name, partial(_check, target, case), case)
    # Latents have no tensors of query tokens.
    sizes = {"head_size": 64} if target.base_case.use_mla else {}
    function = {"score": "attnlib.testing.score_functions:QUERY_BIAS", "token_sinks": True}
    for number, batch in enumerate(_QUERY_TOKENS):
        case = target.case(batch=batch, **function, **sizes)
        yield CheckCase(f"query-tokens-{number}", partial(_check, target, case), case)


CHECKS = (Check("L5", "the share of a sink beside keys of equal weight", _cases),)
