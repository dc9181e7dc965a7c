"""ST16: requests that an engine serves over one pool (T2, T3, T5, T11, T12, T14, T15)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.checks.state_exchange import exported_difference
from attnlib.testing.states.cases import ROLLBACK, over_kinds
from attnlib.testing.states.inputs import TokenInputs, joined
from attnlib.testing.states.layers import (
    LayerUnderTest,
    compare_results,
    drawn,
    expected,
    part_of,
    to_cpu,
)
from attnlib.testing.states.serving import Part, Server

__all__ = ["CHECKS"]

_SLOTS, _UNUSED = [3, 0, 1, 4], [2, 5]
"""Slots of the request that is forked, of the one with NaN, of the extreme one, and of the fork;
and those of no request."""

_NAMES = ("the forked request", "a request before its NaN", "extreme tokens", "a fork")


def _extreme(tokens: TokenInputs) -> TokenInputs:
    """Strong decays everywhere, and keys of zeros in each third row."""
    key, decay = tokens.key, tokens.log_decay
    if key is not None:
        zero = (torch.arange(len(tokens)) % 3 == 0).reshape(-1, 1, 1)
        tokens = replace(tokens, key=key.masked_fill(zero, 0.0))
    return tokens if decay is None else replace(tokens, log_decay=torch.full_like(decay, -6.0))


def _requests(spec: StateSpec, seed: int, chunk: int, shared: int) -> list[TokenInputs]:
    """The tokens of the requests of `_SLOTS`; the last one continues `shared` of the first."""
    whole = drawn(spec, 3 * chunk, seed)
    poisoned = drawn(spec, chunk + 4, seed + 1)
    for tensor in poisoned.tensors().values():
        tensor[chunk:] = torch.nan
    fork = joined([whole.rows(0, shared), drawn(spec, 7, seed + 3)])
    return [whole, poisoned, _extreme(drawn(spec, 31, seed + 2)), fork]


def _served(target: BackendUnderTest, spec: StateSpec) -> str:
    """A fork, drafts that are taken back, NaN, extreme tokens and padding in one run of steps."""
    chunk = target.backend.resolve_state_spec(spec).chunk_size or 16
    drafts, shared = spec.max_rollback, 2 * chunk - 2
    layer = LayerUnderTest(target, spec, num_slots=6)
    server = Server(spec, layer, _requests(spec, target.seed + 16, chunk, shared), _SLOTS, 2)
    unused = to_cpu(layer.memory[_UNUSED])
    server.step([Part(0, shared), Part(1, chunk), Part(-1, 0), Part(2, 24)])
    server.done[3], source = shared, to_cpu(layer.memory[_SLOTS[0]])
    server.step([Part(3, 2), Part(2, 1), Part(-1, 2)], [_SLOTS[0], _SLOTS[2], -1])
    if not torch.equal(source, to_cpu(layer.memory[_SLOTS[0]])):
        return "the source of a fork changed (T12)"
    server.step([Part(0, 1, drafts), Part(3, 1, drafts), Part(1, 3), Part(2, 2)])
    server.step([Part(0, 2), Part(3, 2), Part(2, 1, drafts), Part(1, 1)])
    server.step([Part(0, chunk - 1), Part(3, 2), Part(2, 2)])
    if not torch.equal(unused, to_cpu(layer.memory[_UNUSED])):
        return "a slot of no request changed (T5)"
    for request, what in enumerate(_NAMES):
        first = shared if request == 3 else 0
        tokens, done = server.requests[request], server.done[request]
        done = chunk if request == 1 else done
        wanted, rows = expected(spec, layer.tensors, tokens.rows(0, done)), slice(first, done)
        got = part_of(server.result(request), slice(0, done - first))
        if message := compare_results(spec, got, wanted, what, rows):
            return message
    assert server.done[0] == 3 * chunk  # a multiple of the chunk, as states are exported
    return exported_difference(spec, layer, server.requests[0], _SLOTS[0])


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    rollback = min(ROLLBACK, target.backend.state_capabilities.max_rollback or 0)
    yield from over_kinds(target, _served, rollback=rollback)


CHECKS = (Check("ST16", "states: requests served over one pool", _cases, kind="state"),)
