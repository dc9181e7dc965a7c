"""ST9: the bits of a row do not depend on steps, batches and drafts, where declared (T18)."""

from __future__ import annotations

import random
from functools import partial

from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import Check
from attnlib.testing.states.cases import ROLLBACK, over_kinds
from attnlib.testing.states.layers import LayerUnderTest, compare_result_bits, drawn
from attnlib.testing.states.serving import Server, Step

__all__ = ["CHECKS", "same_bits"]


def same_bits(target: BackendUnderTest, spec: StateSpec, trials: int) -> str:
    """Three requests in random steps with drafts and padding, each against one step alone."""
    requests = [drawn(spec, count, target.seed + count) for count in (41, 18, 70)]
    alone = []
    for tokens in requests:
        layer, count = LayerUnderTest(target, spec, num_slots=1), len(tokens)
        alone.append(layer.run(tokens, Step([count], [count], [0])))
    for trial in range(trials):
        rng = random.Random(target.seed + trial)
        layer = LayerUnderTest(target, spec, num_slots=6)
        server = Server(spec, layer, requests, rng.sample(range(6), 3), extra_rows=trial)
        server.serve_all(rng)
        for request in range(3):
            what = f"request {request} in random steps, against one step alone"
            if message := compare_result_bits(server.result(request), alone[request], what):
                return message
    return ""


def _bits(target: BackendUnderTest, spec: StateSpec) -> str:
    return same_bits(target, spec, 1 if target.quick else 3)


_cases = partial(over_kinds, body=_bits, rollback=ROLLBACK, batch_invariant=True)

CHECKS = (Check("ST9", "states: bits of a batch-invariant layer", _cases, kind="state"),)
