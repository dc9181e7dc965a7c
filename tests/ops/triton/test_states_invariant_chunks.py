"""T18 on Hopper: steps of all kinds in the kernels of long steps, in chunks of the slots."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnlib.spec import StateSpec
from attnlib.testing.states.inputs import TokenInputs, draw_layer, draw_tokens
from attnlib.testing.states.serving import Part, Results, Server, Step
from tests.ops.torch.states import layers
from tests.ops.torch.states.layers import forgetting, largest_error, wanted
from tests.ops.triton.test_states_long_step import (
    LIMIT,
    long_steps,
    operations,
    spec_of,
)

__all__ = ["long_steps"]

LENGTHS = (53, 18)


def invariant(name: str, **options: Any) -> StateSpec:
    return spec_of(name, **{"batch_invariant": True, "max_rollback": 0, **options})


def alone(spec: StateSpec, tokens: TokenInputs) -> Results:
    """A request in one step."""
    step = Step([len(tokens)], [len(tokens)], [0])
    return operations(spec, 1).run(tokens, step)


def same(a: Results, b: Results, rows: slice = slice(None)) -> bool:
    assert a.out is not None and b.out is not None
    return torch.equal(a.out, b.out[rows])


LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("gated delta", {}),
    ("gated delta", {"key_size": 128, "state_dtype": torch.bfloat16}),
    ("kimi delta", {"key_size": 128}),
    ("kimi delta", {"chunk_size": 32}),
    ("mamba2", {"key_size": 128, "value_size": 128}),
    ("lightning", {"chunk_size": 32, "state_dtype": torch.bfloat16}),
    ("gla", {"value_size": 192}),
]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("name", "options"), LAYERS)
def test_bits(name: str, options: dict[str, Any], drafts: int, long_steps: list[int]) -> None:
    """One step, single tokens, and steps of random sizes with drafts, of two requests beside
    padding; values are right, too."""
    spec = invariant(name, max_rollback=drafts, **options)
    requests = [draw_tokens(spec, count, count) for count in LENGTHS]
    expected = [alone(spec, request) for request in requests]
    limit = LIMIT if spec.state_dtype == torch.float32 else 2 * LIMIT
    for request, one in zip(requests, expected, strict=True):
        assert largest_error(one, wanted(spec, draw_layer(spec), request)) < limit
    single = Server(spec, operations(spec), requests[:1], [3])
    for _ in range(LENGTHS[0]):
        single.step([Part(0, 1)])
    assert same(single.result(0), expected[0])
    for seed in range(2):
        server = Server(spec, operations(spec), requests, [5, 2], extra_rows=2)
        server.serve_all(random.Random(seed))
        for place, one in enumerate(expected):
            assert same(server.result(place), one)
    assert len(long_steps) > LENGTHS[0]


@pytest.mark.parametrize("every", [1, 3, 11])
@pytest.mark.parametrize("name", ["gated delta", "kimi delta", "gla"])
def test_bits_of_tokens_that_forget(name: str, every: int) -> None:
    """T5: no later token changes how products with decays per channel are computed."""
    spec = invariant(name)
    request = forgetting(draw_tokens(spec, LENGTHS[0], 1), every)
    expected = alone(spec, request)
    assert largest_error(expected, wanted(spec, draw_layer(spec), request)) < LIMIT
    server = Server(spec, operations(spec), [request], [3])
    for count in (1, 1, 1, 2, 4, 8, 1, 16, 3, 1, 1, 14):
        server.step([Part(0, count)])
    assert same(server.result(0), expected)


@pytest.mark.parametrize("name", ["gated delta", "kimi delta"])
def test_bits_of_forks(name: str) -> None:
    """T16: every step leaves its slot behind, at, before and after a multiple of c."""
    spec = invariant(name, max_rollback=3)
    tokens, runner = draw_tokens(spec, 90, 1), operations(spec, 5)
    expected, done, slot = alone(spec, tokens), 0, 0
    for count in (19, 1, 1, 11, 16, 1, 20, 11, 1, 1):
        end, other = done + count, (slot + 2) % 5
        got = runner.run(tokens.rows(done, end), Step([count], [end], [other], [slot]))
        assert same(got, expected, slice(done, end)), done
        done, slot = end, other


def test_states_of_steps() -> None:
    """The states of one step and of several are equal."""
    spec, states = invariant("kimi delta"), []
    request = draw_tokens(spec, 48, 1)
    for counts in ([48], [1, 20, 27], [16, 15, 1, 16]):
        server = Server(spec, operations(spec), [request], [3])
        for count in counts:
            server.step([Part(0, count)])
        state = server.runner.slots.state
        assert state is not None
        states.append(state[3].clone())
    assert all(torch.equal(one, states[0]) for one in states)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_request_with_more_tokens_than_the_step_says_ends(
    drafts: int, monkeypatch: pytest.MonkeyPatch, long_steps: list[int]
) -> None:
    """Its outputs are undefined, but no program waits forever for chunks without memory."""
    batch_of = layers.batch_of
    monkeypatch.setattr(layers, "batch_of", lambda step: replace(batch_of(step), max_query_len=1))
    spec = invariant("gated delta", max_rollback=drafts)
    alone(spec, draw_tokens(spec, 60, 1))
    assert long_steps == [60]
