"""ST1 to ST4: one step, many steps, ragged batches, rejected drafts (T1, T2, T10, T11)."""

from __future__ import annotations

import random
from functools import partial

from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import Check
from attnlib.testing.states.cases import ROLLBACK, over_kinds
from attnlib.testing.states.layers import (
    LayerUnderTest,
    compare_results,
    drawn,
    expected,
)
from attnlib.testing.states.serving import Part, Server, Step

__all__ = ["CHECKS"]


def _one_step(target: BackendUnderTest, spec: StateSpec) -> str:
    """Prompts of lengths around 1, the window and the chunk, in slots of other requests."""
    chunk, lengths = target.backend.resolve_state_spec(spec).chunk_size or 16, {1, 2, 5}
    lengths |= {chunk - 1, chunk, chunk + 1} | (set() if target.quick else {2 * chunk, 131})
    layer = LayerUnderTest(target, spec)
    for length in sorted(lengths):
        tokens = drawn(spec, length, target.seed + length)
        got = layer.run(tokens, Step([length], [length], [length % 5]))
        wanted = expected(spec, layer.tensors, tokens)
        if message := compare_results(spec, got, wanted, f"a prompt of {length} tokens"):
            return message
    return ""


def _many_steps(target: BackendUnderTest, spec: StateSpec) -> str:
    """One request, down to single tokens."""
    rng, layer = random.Random(target.seed), LayerUnderTest(target, spec)
    tokens = drawn(spec, 60 if target.quick else 130, target.seed + 4)
    server = Server(spec, layer, [tokens], [2])
    while server.left(0):
        server.step([Part(0, min(server.left(0), rng.choice((1, 1, 2, 3, 17, 30))))])
    return compare_results(spec, server.result(0), expected(spec, layer.tensors, tokens), "steps")


_PARTS = ((7, 1, 30), (0, 3, 1), (1, 0, 1), (13, 17, 8))
"""New tokens of three requests in four steps."""


def _batches(target: BackendUnderTest, spec: StateSpec) -> str:
    """First steps beside decodes, requests without tokens, padding with and without tokens."""
    layer = LayerUnderTest(target, spec)
    requests = [drawn(spec, count, target.seed + place) for place, count in enumerate((21, 21, 40))]
    server = Server(spec, layer, requests, [3, 0, 1], extra_rows=3)
    for counts in _PARTS:
        parts = [Part(request, count) for request, count in enumerate(counts)]
        batch = [parts[0], Part(-1, 0), parts[1], Part(-1, 2), parts[2]]
        results = server.step(batch)
        padding = sum(counts[:2])
        rows = [padding, padding + 1, *(sum(counts) + 2 + extra for extra in range(3))]
        for name, tensor in zip(("convolution", "recurrence"), results, strict=True):
            if tensor is not None and not bool((tensor[rows] == 0).all()):
                return f"{name}: rows of padding and past the batch must be 0 (T3)"
    for request, tokens in enumerate(requests):
        wanted = expected(spec, layer.tensors, tokens)
        what = f"request {request} of a ragged batch"
        if message := compare_results(spec, server.result(request), wanted, what):
            return message
    return ""


def _rollback(target: BackendUnderTest, spec: StateSpec) -> str:
    """Steps of 1 + D tokens, every accepted prefix, contexts around a multiple of the chunk."""
    chunk = target.backend.resolve_state_spec(spec).chunk_size or 16
    layer = LayerUnderTest(target, spec)
    # The state of the first chunk is zero and not read, so drafts must cross the second one too.
    contexts = [0, chunk - 2, chunk, 2 * chunk - 2]
    if not target.quick:
        contexts += [1, 3, chunk - 1, 2 * chunk - 1]
    tokens = drawn(spec, 2 * chunk + 7, target.seed + 3)
    wanted = expected(spec, layer.tensors, tokens)
    for context in contexts:
        for drafts in range(1, ROLLBACK + 1):
            server = Server(spec, layer, [tokens], [1])
            if context:
                server.step([Part(0, context)])
            for stay in (1 + ROLLBACK - drafts, 2):
                server.step([Part(0, stay, drafts if stay + drafts == 1 + ROLLBACK else 0)])
            rows = slice(0, server.done[0])
            what = f"{drafts} of {1 + ROLLBACK} tokens taken back after {context}"
            if message := compare_results(spec, server.result(0), wanted, what, rows):
                return message
    return ""


CHECKS = tuple(
    Check(name, f"states: {title}", partial(over_kinds, body=body, rollback=drafts), kind="state")
    for name, title, body, drafts in (
        ("ST1", "one step against the rules", _one_step, 0),
        ("ST2", "one request in many steps", _many_steps, 0),
        ("ST3", "ragged batches and padding", _batches, 0),
        ("ST4", "drafts that are taken back", _rollback, ROLLBACK),
    )
)
