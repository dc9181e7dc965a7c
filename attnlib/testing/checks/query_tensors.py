"""S6: each query token has its own tensors and its own sink (M21, M22).

Rows past the tokens of the batch hold NaN. Rows of another request, of another part of a mixed
batch, or of the call before, a sink that is that of another token or counts per split, and tensors
that are rounded give other results than the oracle. NaN in the row of one token stays in its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from attnlib.score_functions.query_tensors import QueryTensors
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.runner import (
    AttentionOutput,
    check_supported,
    compare_with_oracle,
    equals_result_without,
    run_case,
    run_materialized_case,
)

__all__ = ["CHECKS", "call_twice"]

_BATCHES = {
    "decode": "q1s37_q1s5_q4s80",
    "prefill": "q23_q17s70",
    "mixed": "q1s50_q9s44_q2s2_q20",
    "splits": "q1s300_q1s7_q2s200",
    "padding": "q1s9_q0s0_q3s20_pad4",
}
_FUNCTIONS: dict[str, dict[str, object]] = {
    "relative": {"score": "attnlib.score_functions.builtin:relative_logits"},
    "tokens": {"score": "attnlib.testing.score_functions:QUERY_TOKENS"},
    "sinks": {"token_sinks": True},
    "both": {"token_sinks": True, "score": "attnlib.score_functions.builtin:relative_logits"},
}
_FEATURES: dict[str, dict[str, object]] = {
    "no_lse": {"needs_lse": False},
    "window": {"sliding_window": 21},
    "soft_cap": {"logits_soft_cap": 3.0},
    "alibi": {"alibi": True},
    "per_request": {"mask": "per_request"},
    "chunk": {"attention_chunk_size": 24},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5},
    "pages": {"kv_cache_dtype": "int8_per_token_head", "head_size": 64},
    "rotated": {
        "kv_cache_dtype": "int8_per_token_head",
        "head_size": 64,
        "kv_rotation": "hadamard",
    },
    "invariant": {"batch_invariant": True},
    "encoder": {"attn_type": "encoder_only", "mask": "bidirectional", "batch": "q23_q7"},
}
_PHASES = {"relative": tuple(_BATCHES), "sinks": tuple(_BATCHES)}
"""Batches of a function; others run the mixed one."""
_QUICK = ("mixed", "splits")


def _check(target: BackendUnderTest, case: Case) -> str:
    output = run_case(target.backend, case, target.device)
    error = compare_with_oracle(case, output, target.device)
    if not error or not case.token_sinks:
        return error
    plain = case.replace(token_sinks=False).materialize(target.device)
    step = case.materialize(target.device)
    results = [(x.oracle(), x.oracle(case.torch_dtype)) for x in (step, plain)]
    if equals_result_without(output, results[0], results[1], case.torch_dtype):
        return f"the sinks are ignored: the output equals the one without | case: {case}"
    return error


def _changed(given: QueryTensors, token: int) -> QueryTensors:
    """The tensors with NaN in the row of one token."""
    tensors = {name: tensor.clone() for name, tensor in given.tensors.items()}
    sinks = None if given.sinks is None else given.sinks.clone()
    for tensor in (*tensors.values(), sinks):
        if tensor is not None and tensor.is_floating_point():
            tensor[token] = torch.nan
    return QueryTensors(tensors, sinks)


def _run(target: BackendUnderTest, step: MaterializedCase, given: QueryTensors) -> torch.Tensor:
    """The output of a step with other tensors of its query tokens."""
    inputs = replace(step.inputs, out=torch.empty_like(step.inputs.out))
    step = replace(step, inputs=inputs, given_query_tensors=given)
    return run_materialized_case(target.backend, step).out


def _check_isolated(target: BackendUnderTest, case: Case) -> str:
    """NaN of one token reaches the output of this token only."""
    check_supported(target.backend, case, target.device)
    step = case.materialize(target.device)
    given = step.query_tensors()
    assert given is not None  # all cases have some
    clean = _run(target, step, given)
    for token in (0, case.batch_spec.num_actual_tokens - 1):
        out = _run(target, step, _changed(given, token))
        others = [row for row in range(len(out)) if row != token]
        if not torch.equal(out[others], clean[others]):
            return f"NaN in the row of token {token} changes other rows | case: {case}"
        if not out[token].isnan().all():
            return f"NaN in the row of token {token} does not reach its output | case: {case}"
    return ""


def call_twice(target: BackendUnderTest, step: MaterializedCase) -> AttentionOutput:
    """The output of the second of two calls of a layer over one batch, with other tensors each."""
    from attnlib.layer import Attention

    case = step.case
    layer = Attention(
        step.spec,
        backend=target.backend,
        scale=step.params.scale,
        score_tensors=step.score_tensors(),
        device=target.device,
    )
    metadata = target.backend.make_builder(case.spec, target.device).build(0, step.common())
    given, inputs = step.query_tensors(), step.inputs
    assert given is not None
    other = QueryTensors(
        {name: tensor.flip(0) for name, tensor in given.tensors.items()},
        None if given.sinks is None else given.sinks.flip(0),
    )
    lse = None
    for tensors in (other, given):
        inputs.out.fill_(torch.nan)
        found = layer(
            inputs.query,
            None,
            None,
            step.cache(),
            metadata,
            return_lse=case.needs_lse,
            output=inputs.out,
            query_tensors=tensors,
        )
        lse = found[1] if case.needs_lse else None
    return AttentionOutput(inputs.out, lse)


def _check_layer(target: BackendUnderTest, case: Case) -> str:
    check_supported(target.backend, case, target.device)
    output = call_twice(target, case.materialize(target.device))
    return compare_with_oracle(case, output, target.device)


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    # Latents have no tensors of query tokens.
    sizes = {"head_size": 64} if target.base_case.use_mla else {}
    functions = {name: {**sizes, **fields} for name, fields in _FUNCTIONS.items()}
    for name, fields in functions.items():
        for phase in _PHASES.get(name, ("mixed",)):
            if not target.quick or phase in _QUICK:
                case = target.case(batch=_BATCHES[phase], **fields)
                yield CheckCase(f"{name}-{phase}", partial(_check, target, case), case)
        case = target.case(batch="q1s20_q3s9", needs_lse=False, **fields)
        yield CheckCase(f"{name}-one-row", partial(_check_isolated, target, case), case)
        if name == "both":
            yield CheckCase(f"{name}-layer", partial(_check_layer, target, case), case)
    if target.quick:
        return
    for name, fields in _FEATURES.items():
        case = target.case(**{"batch": _BATCHES["mixed"], **functions["both"], **fields})
        yield CheckCase(f"both-{name}", partial(_check, target, case), case)


CHECKS = (Check("S6", "each query token has its own tensors and sink", _cases),)
