"""ST8: the states themselves: forks, canonical states, copies (T12, T20)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.states.cases import ROLLBACK, over_kinds
from attnlib.testing.states.inputs import LayerTensors, TokenInputs, joined
from attnlib.testing.states.layers import (
    LayerUnderTest,
    compare_results,
    drawn,
    expected,
    part_of,
    state_difference,
    to_cpu,
)
from attnlib.testing.states.oracle import recurrence
from attnlib.testing.states.serving import Step

__all__ = ["CHECKS", "exported_difference"]


def _forks(target: BackendUnderTest, spec: StateSpec) -> str:
    """Two requests continue from one source, which stays as it is."""
    layer, tokens = LayerUnderTest(target, spec), drawn(spec, 24, target.seed + 8)
    layer.run(tokens.rows(0, 19), Step([19], [19], [0]))
    before = to_cpu(layer.memory[0])
    wanted = expected(spec, layer.tensors, tokens)
    both = joined([tokens.rows(19, 20), tokens.rows(19, 22)])
    got = layer.run(both, Step([1, 3], [20, 22], [3, 1], [0, 0]))
    later = layer.run(
        joined([tokens.rows(20, 24), tokens.rows(22, 24)]), Step([4, 2], [24, 24], [3, 1])
    )
    if not torch.equal(before, to_cpu(layer.memory[0])):
        return "the source of a fork changed (T12)"
    for what, result, rows, positions in (
        ("a fork of one token", got, slice(0, 1), slice(19, 20)),
        ("a fork of three tokens", got, slice(1, 4), slice(19, 22)),
        ("a fork after its first step", later, slice(0, 4), slice(20, 24)),
        ("the other fork after its first step", later, slice(4, 6), slice(22, 24)),
    ):
        if message := compare_results(spec, part_of(result, rows), wanted, what, positions):
            return message
    return ""


def _forks_taken_back(target: BackendUnderTest, spec: StateSpec) -> str:
    """A fork whose drafts are all rejected continues from what its source held (T10, T12)."""
    layer, tokens = LayerUnderTest(target, spec), drawn(spec, 24, target.seed + 8)
    drafts = drawn(spec, ROLLBACK, target.seed + 9)
    layer.run(tokens.rows(0, 19), Step([19], [19], [0]))
    layer.run(drafts, Step([ROLLBACK], [19 + ROLLBACK], [3], [0]))
    got = layer.run(tokens.rows(19, 24), Step([5], [24], [3]))
    wanted, rows = expected(spec, layer.tensors, tokens), slice(19, 24)
    return compare_results(spec, got, wanted, "a fork whose drafts are taken back", rows)


def _canonical(target: BackendUnderTest, spec: StateSpec) -> str:
    """States out of a slot, against the rules, and into another slot, which continues."""
    layer, chunk = LayerUnderTest(target, spec), target.backend.resolve_state_spec(spec).chunk_size
    count = chunk or 16
    tokens = drawn(spec, count + 5, target.seed + 8)
    layer.run(tokens.rows(0, count), Step([count], [count], [2]))
    own = layer.layer.log_decay
    given = layer.cache.export([2], [count], log_decay=own)
    if message := exported_difference(spec, layer, tokens.rows(0, count), 2):
        return message
    layer.cache.load([4], [count], given)
    got = layer.run(tokens.rows(count, count + 5), Step([5], [count + 5], [4]))
    rows = slice(count, count + 5)
    wanted = expected(spec, layer.tensors, tokens)
    return compare_results(spec, got, wanted, "continued from a canonical state", rows)


def exported_difference(
    spec: StateSpec, layer: LayerUnderTest, tokens: TokenInputs, slot: int
) -> str:
    """How the exported state of a slot that has served these tokens differs from the rules; empty
    if it does not, or the layer has none."""
    own = layer.layer.log_decay
    states = layer.cache.export([slot], [len(tokens)], log_decay=own).states
    if states is None:
        return ""
    message = state_difference(spec, states[0].cpu(), _state(spec, layer.tensors, tokens))
    return message and f"the exported state {message}"


def _state(spec: StateSpec, layer: LayerTensors, tokens: TokenInputs) -> torch.Tensor:
    assert tokens.query is not None and tokens.key is not None and tokens.value is not None
    decay = tokens.log_decay if layer.log_decay is None else layer.log_decay
    assert decay is not None  # of the layer or of the tokens
    _, state = recurrence(
        spec, tokens.query, tokens.key, tokens.value, decay, tokens.beta, scale=1.0
    )
    return state


def _copies(target: BackendUnderTest, spec: StateSpec) -> str:
    """A slot that was copied as bytes continues (T8: its positions travel with it)."""
    layer, tokens = LayerUnderTest(target, spec), drawn(spec, 21, target.seed + 8)
    layer.run(tokens.rows(0, 18), Step([18], [18], [0]))
    layer.cache.copy_slots([(0, 4)])
    got = layer.run(tokens.rows(18, 21), Step([3], [21], [4]))
    wanted, rows = expected(spec, layer.tensors, tokens), slice(18, 21)
    return compare_results(spec, got, wanted, "continued from a copy", rows)


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    for label, body in (("fork", _forks), ("canonical", _canonical), ("copy", _copies)):
        for each in over_kinds(target, body):
            yield CheckCase(f"{label}-{each.id}", each.run, state_spec=each.state_spec)
    names = "gated delta", "mamba2"
    for each in over_kinds(target, _forks_taken_back, names=names, rollback=ROLLBACK):
        yield CheckCase(f"fork-back-{each.id}", each.run, state_spec=each.state_spec)


CHECKS = (Check("ST8", "states: forks, canonical states and copies", _cases, kind="state"),)
