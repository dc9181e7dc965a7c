"""S1: score functions are applied to every score, after the biases and before the mask (M10).

A function that is ignored, applied after the mask, or called with wrong positions gives other
results than the oracle. The cases cover functions of positions, heads and requests, functions with
tensors, rows in which every key is hidden, and functions with bounds. With `attnlib verify --score`
the check runs for the given function instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import compare_with_oracle, equals_result_without, run_case
from attnlib.testing.score_functions import SUITE, load_score_function

__all__ = ["CHECKS"]

_BATCHES = {
    "decode": "decode",
    "prefill": "prefill",
    "mixed": "ragged",
    "splits": "decode_long",
    "chunked": "chunked",
}
_QUICK = (
    "positions", "finite", "requests", "spans", "documents", "multi_item", "head_windows",
)  # fmt: skip
_ALL_PHASES = ("positions", "requests", "documents")
"""Functions that run in every phase; the others run in splits and in a mixed batch."""
_GIVEN: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"sliding_window": 9},
    "sinks": {"sinks": True},
    "soft_cap": {"logits_soft_cap": 3.0},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5},
}
"""Features that a function given by the caller is combined with."""


def _check(target: BackendUnderTest, case: Case) -> str:
    output = run_case(target.backend, case, target.device)
    error = compare_with_oracle(case, output, target.device)
    if not error:
        return ""
    step, plain = (
        changed.materialize(target.device) for changed in (case, case.replace(score=None))
    )
    with_it, without_it = (
        (given.oracle(), given.oracle(case.torch_dtype)) for given in (step, plain)
    )
    if equals_result_without(output, with_it, without_it, case.torch_dtype):
        return f"the score function is ignored: the output equals the one without | case: {case}"
    return error


def _case(target: BackendUnderTest, name: str, **fields: object) -> CheckCase:
    case = target.case(**fields)
    return CheckCase(name, partial(_check, target, case), case)


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    if target.score is not None:
        yield from _given_cases(target, target.score)
        return
    for name, (path, given) in SUITE.items():
        # Latents have no tensors of query tokens (M21).
        plain = target.base_case.use_mla and load_score_function(path).query_tensors
        fields = {**given, "head_size": 64} if plain else given
        for phase, batch in _BATCHES.items():
            in_each_kernel = phase in ("splits", "mixed")
            if (
                (name in _QUICK and in_each_kernel)
                if target.quick
                else (name in _ALL_PHASES or in_each_kernel)
            ):
                yield _case(target, f"{name}-{phase}", batch=batch, score=path, **fields)


def _given_cases(target: BackendUnderTest, path: str) -> Iterator[CheckCase]:
    function = load_score_function(path)
    mask: dict[str, object] = {"mask": "bidirectional"} if function.needs_bidirectional else {}
    for feature, fields in _GIVEN.items():
        if feature == "window" and mask:
            continue
        for phase, batch in _BATCHES.items():
            if not target.quick or feature == "plain":
                yield _case(target, f"{feature}-{phase}", batch=batch, score=path, **mask, **fields)
    if not mask:
        for phase, batch in _BATCHES.items():
            yield _case(
                target, f"bidirectional-{phase}", batch=batch, score=path, mask="bidirectional"
            )


CHECKS = (Check("S1", "score functions change the scores as specified", _cases),)
