"""F1: every parameter has an effect, and the correct one.

A parameter that is accepted and ignored passes any test that compares a backend with itself. This
check turns each parameter on, separately for decodes and prefills. The result must be within budget
of the oracle with the parameter, and differ by at least ten times the budget from the oracle
without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import compare_with_oracle, equals_result_without, run_case

__all__ = ["CHECKS"]

_FACTOR = 10
_FP8: dict[str, object] = {"kv_cache_dtype": "fp8_e4m3"}
_BATCHES = {"decode": "q1s37_q4s7_q4s9_q1s64", "prefill": "q23_q17s24"}
_PARAMETERS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    # name: (fields with it, fields without it)
    "scale": ({"scale": 0.5}, {}),
    "soft_cap": ({"logits_soft_cap": 1.0}, {}),
    "sliding_window": ({"sliding_window": 6}, {}),
    "two_sided_window": ({"mask": "bidirectional", "window": (4, 2)}, {"mask": "bidirectional"}),
    "attention_chunk": ({"attention_chunk_size": 16}, {}),
    "alibi": ({"alibi": True}, {}),
    "sinks": ({"sinks": True}, {}),
    "bidirectional": ({"mask": "bidirectional"}, {}),
    "per_request_causal": ({"mask": "per_request"}, {}),
    "query_bias": ({"mask": "query_bias"}, {}),
    "score_function": ({"score": "attnlib.testing.score_functions:POSITIONS"}, {}),
    "key_selection": ({"key_selection": ("kv_head", 4, 2, 1)}, {}),
    "k_scale": ({**_FP8, "k_scale": 0.25}, _FP8),
    "v_scale": ({**_FP8, "v_scale": 0.5}, _FP8),
    "k_scale_per_head": (
        {**_FP8, "k_scale": 0.25, "kv_scale_kind": "head"},
        {**_FP8, "kv_scale_kind": "head"},
    ),
    "v_scale_per_head": (
        {**_FP8, "v_scale": 0.5, "kv_scale_kind": "head"},
        {**_FP8, "kv_scale_kind": "head"},
    ),
}


def _check(target: BackendUnderTest, parameter: str, case: Case, without: dict[str, object]) -> str:
    # The suite fills the cache, so that a write and a read that both ignore a scale do not cancel.
    step = case.materialize(target.device)
    output = run_case(target.backend, case, target.device, kv_written=True)
    error = compare_with_oracle(case, output, target.device, step)
    plain = case.replace(
        **{name: getattr(Case(), name) for name in (*_PARAMETERS[parameter][0],)}
    ).replace(**without)
    off = plain.oracle_params(target.device)
    with_it = step.oracle(), step.oracle(case.torch_dtype)
    without_it = step.inputs.oracle(off), step.inputs.oracle(off, case.torch_dtype)
    allowed = compare(output.out, with_it[0].out, with_it[1].out, case.torch_dtype)
    moved = float((output.out.double() - without_it[0].out).abs().nan_to_num().max())
    if not error and moved < _FACTOR * allowed.max_allowed:
        return (
            f"{parameter} changes the output by {moved:.3g}, less than {_FACTOR} times the allowed "
            f"error {allowed.max_allowed:.3g} | case: {case}"
        )
    if error and equals_result_without(output, with_it, without_it, case.torch_dtype):
        return f"{parameter} is ignored: the output equals the one without it | case: {case}"
    return f"{parameter}: {error}" if error else ""


def _sensitivity(target: BackendUnderTest) -> Iterator[CheckCase]:
    for parameter, (with_it, without) in _PARAMETERS.items():
        for phase, batch in _BATCHES.items():
            if target.quick and phase == "prefill" and parameter.endswith("per_head"):
                continue
            case = target.case(batch=batch, **with_it)
            if case.needs_lse and not target.supports(case):
                case = case.replace(needs_lse=False)  # it may lack the LSE alone
            yield CheckCase(
                f"{parameter}-{phase}",
                partial(_check, target, parameter, case, without),
                case,
            )


CHECKS = (Check("F1", "every parameter has the specified effect", _sensitivity),)
