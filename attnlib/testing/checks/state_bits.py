"""ST9: the bits of a row do not depend on steps, batches and drafts, where declared (T18)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.states.cases import (
    ROLLBACK,
    case,
    over_kinds,
    recurrent_kinds,
    with_large_heads,
)
from attnlib.testing.states.certificate import served_alone, served_together
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.layers import compare_result_bits, drawn

__all__ = ["CHECKS"]


def _bits(target: BackendUnderTest, spec: StateSpec) -> str:
    """Three requests in random steps with drafts and padding, each against one step alone."""
    requests = [drawn(spec, count, target.seed + count) for count in (41, 18, 70)]
    alone = [served_alone(target, spec, tokens) for tokens in requests]
    trials = 1 if target.quick else 3
    for request, _, got in served_together(target, spec, requests, trials):
        what = f"request {request} in random steps, against one step alone"
        if message := compare_result_bits(got, alone[request], what):
            return message
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    given: dict[str, Any] = {"max_rollback": ROLLBACK, "batch_invariant": True}
    yield from over_kinds(target, _bits, rollback=ROLLBACK, batch_invariant=True)
    for name in recurrent_kinds():
        if spec := with_large_heads(target, KINDS[name].replace(**given)):
            yield case(f"{name.replace(' ', '-')}-large", target, spec, _bits)


CHECKS = (Check("ST9", "states: bits of a batch-invariant layer", _cases, kind="state"),)
