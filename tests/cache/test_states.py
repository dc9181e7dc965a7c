"""Slots of state layers: allocation, copies, positions, canonical states."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import attnlib
from attnlib import Attention, AttentionSpec, PagedKVCache, StateLayer
from attnlib.cache.states import CanonicalStates, StateCache, state_layout
from attnlib.errors import ContractError
from attnlib.spec import StateSpec
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.oracle import recurrence
from attnlib.testing.states.serving import Part, Server
from tests.ops.torch.states.layers import Operations, largest_error, wanted

GDN = KINDS["gated delta"]


def served(spec: StateSpec, counts: list[int], slot: int = 2) -> tuple[StateCache, Server]:
    """A cache in which one request has run some steps."""
    cache = StateCache.allocate(spec, 5, device="cpu")
    runner = Operations(spec, draw_layer(spec), cache.layout.form, 5)
    runner.slots, runner.memory = cache.tensors, cache.memory
    server = Server(spec, runner, [draw_tokens(spec, 60, 9)], [slot])
    for count in counts:
        server.step([Part(0, count)])
    return cache, server


def test_allocation() -> None:
    cache = StateCache.allocate(GDN, 3, device="cpu")
    assert (cache.num_slots, cache.layout) == (3, state_layout(GDN))
    assert cache.positions([0, 1, 2]) == [(-1, -1)] * 3
    assert repr(cache) == f"StateCache(3 slots of {cache.bytes_per_slot} bytes, form=plain, " + (
        "device=cpu)"
    )
    with pytest.raises(ContractError, match="num_slots=0 must be at least 1"):
        StateCache.allocate(GDN, 0)


def test_slots_in_strided_blocks() -> None:
    """A pool's block may be larger than a slot; nothing else of it is written."""
    size = state_layout(GDN).bytes_per_slot
    pool = torch.full((4, size + 256), 7, dtype=torch.uint8)
    cache = StateCache(GDN, pool)
    cache.tensors.state.zero_()
    cache.tensors.window.zero_()
    assert (pool[:, size:] == 7).all() and pool[:, :size].eq(0).any()


@pytest.mark.parametrize("form", ["plain", "snapshots", "tail"])
def test_copies_continue(form: str) -> None:
    spec = GDN.replace(form=form, max_rollback=0 if form == "plain" else 2)
    cache, server = served(spec, [19])
    other = StateCache.allocate(spec, 3, device="cpu")
    cache.copy_slots([(2, 0), (2, 4)])
    cache.copy_slots(torch.tensor([[4, 1]]), other)
    for runner_slots, slot in ((cache, 0), (other, 1)):
        runner = Operations(spec, draw_layer(spec), form)
        runner.slots = runner_slots.tensors
        fork = Server(spec, runner, server.requests, [slot])
        fork.done = [19]
        fork.step([Part(0, 4)])
        expected = wanted(spec, draw_layer(spec), server.requests[0].rows(0, 23))
        rows = type(expected)(*(x[19:] for x in expected))
        assert largest_error(fork.result(0), rows) < 1e-5


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 5)], r"destinations\[0\]=5 is outside the cache of 5 slots"),
        ([(0, 1), (-1, 2)], r"sources\[1\]=-1 is outside"),
        ([(0, 1), (2, 1)], "each destination must be named once"),
        ([(0, 1), (1, 2)], "and be no source"),
        ([(0.9, 1)], r"source slot 0\.9 is a float"),
        (torch.tensor([[0.0, 1.5]]), "it must be an integer"),
        ([0, 1], "takes .source, destination. pairs"),
        ([(0, 1, 2)], "takes .source, destination. pairs"),
    ],
)
def test_refused_copies(pairs: list[tuple[int, int]], message: str) -> None:
    cache = StateCache.allocate(GDN, 5, device="cpu")
    before = cache.memory.clone()
    with pytest.raises(ContractError, match=message):
        cache.copy_slots(pairs)
    assert torch.equal(cache.memory, before)
    with pytest.raises(ContractError, match="do not fit"):
        cache.copy_slots([(0, 1)], StateCache.allocate(KINDS["gla"], 5, device="cpu"))


def test_slots_that_are_no_list() -> None:
    cache = StateCache.allocate(GDN, 5, device="cpu")
    with pytest.raises(ContractError, match="slots=1 is a int; it must be a list of ids"):
        cache.positions(1)
    with pytest.raises(ContractError, match=r"state_sources\[0\]=-1 is negative: pass a slot"):
        attnlib.CommonAttentionMetadata.from_lengths(
            [1], [2], device="cpu", state_slots=[0], state_sources=[-1]
        )


def test_refused_memory() -> None:
    """T15, and specs of another kind of layer."""
    size = state_layout(GDN).bytes_per_slot
    memory = torch.zeros(4 * size + 16, dtype=torch.uint8)
    apart = memory[1 : 4 * size + 1].view(4, size)
    for wrong in (
        memory,
        apart,
        memory[:size].expand(4, size),
        memory.as_strided((4, size), (16, 1)),
    ):
        with pytest.raises(ContractError, match="begin at multiples of 16 bytes"):
            StateCache(GDN, wrong)
    attention = AttentionSpec(num_heads=1, head_size=8, dtype=torch.float32)
    with pytest.raises(ContractError, match="StateCache takes an attnlib.StateSpec"):
        StateCache.allocate(attention, 3)
    with pytest.raises(ContractError, match="StateLayer takes an attnlib.StateSpec"):
        StateLayer(attention)
    with pytest.raises(ContractError, match="Attention takes an attnlib.AttentionSpec"):
        Attention(GDN, device="cpu")
    with pytest.raises(ContractError, match="PagedKVCache.allocate takes.*StateCache a StateSpec"):
        PagedKVCache.allocate(GDN, 3)


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].has_recurrence])
@pytest.mark.parametrize("form", ["plain", "snapshots", "tail"])
def test_exported_states(name: str, form: str) -> None:
    """Every position that a slot can continue from, against the oracle."""
    spec = KINDS[name].replace(form=form, max_rollback=0 if form == "plain" else 3)
    own = draw_layer(spec)
    cache, server = served(spec, [14, 5])
    low, high = cache.positions([2])[0]
    assert (low, high) == ((19, 19) if form == "plain" else (16, 19))
    for position in range(low, high + 1):
        tokens = server.requests[0].rows(0, position)
        got = cache.export([2], [position], log_decay=own.log_decay)
        decay = tokens.log_decay if own.log_decay is None else own.log_decay
        _, state = recurrence(
            spec, tokens.query, tokens.key, tokens.value, decay, tokens.beta, scale=1.0
        )
        torch.testing.assert_close(got.states[0].double(), state, rtol=1e-5, atol=1e-5)
        if spec.has_convolution:
            assert torch.equal(got.windows[0], tokens.x[-(spec.conv_width - 1) :].mT)
    with pytest.raises(ContractError, match="can continue from") as error:
        cache.export([2], [20], log_decay=own.log_decay)
    assert error.value.rule == "T8"


@pytest.mark.parametrize("name", ["gated delta", "kimi delta"])
def test_autocast_changes_no_exported_state(name: str) -> None:
    """A tail is replayed by products, which autocast would round to bfloat16."""
    cache, _ = served(KINDS[name].replace(form="tail"), [21])
    exact = cache.export([2], [21]).states
    with torch.autocast("cpu", torch.bfloat16):
        found = cache.export([2], [21]).states
    assert exact is not None and found is not None and torch.equal(found, exact)


def test_a_tail_with_a_constant_decay_needs_it() -> None:
    cache, _ = served(KINDS["lightning"].replace(form="tail"), [5])
    with pytest.raises(ContractError, match="pass log_decay"):
        cache.export([2], [5])


@pytest.mark.parametrize("target", ["plain", "snapshots", "tail"])
@pytest.mark.parametrize("form", ["plain", "snapshots", "tail"])
def test_loaded_states_continue(form: str, target: str) -> None:
    """Out of every form into every form, at a position that a tail can begin with, and before the
    window is full."""
    for count in (16, 2):
        if count == 2 and target == "tail":
            continue
        source = GDN.replace(form=form)
        cache, server = served(source, [count])
        spec = GDN.replace(form=target)
        other = StateCache.allocate(spec, 3, device="cpu")
        other.load([1], [count], cache.export([2], [count]))
        runner = Operations(spec, draw_layer(spec), target)
        runner.slots = other.tensors
        fork = Server(spec, runner, server.requests, [1])
        fork.done = [count]
        fork.step([Part(0, 5)])
        expected = wanted(spec, draw_layer(spec), server.requests[0].rows(0, count + 5))
        rows = type(expected)(*(x[count:] for x in expected))
        assert largest_error(fork.result(0), rows) < 1e-5


def test_refused_states() -> None:
    cache = StateCache.allocate(GDN.replace(form="tail"), 3, device="cpu")
    state, window = torch.zeros(1, 4, 16, 16), torch.zeros(1, 24, 3)
    with pytest.raises(ContractError, match="a state after 5 tokens cannot become that of a tail"):
        cache.load([0], [5], CanonicalStates(state, window))
    with pytest.raises(ContractError, match=r"states have shape \(4, 16, 8\)"):
        cache.load([0], [16], CanonicalStates(state[..., :8], window))
    with pytest.raises(ContractError, match="windows of shape None"):
        cache.load([0], [16], CanonicalStates(state, None))
    with pytest.raises(ContractError, match=r"slots\[0\]=3 is outside"):
        cache.load([3], [16], CanonicalStates(state, window))
    two = CanonicalStates(torch.cat([state] * 2), torch.cat([window] * 2))
    before = cache.memory.clone()
    for slots, positions, given, message in (
        ([0, 1], [16, 17], two, "after 17 tokens"),
        ([0, 0], [16, 32], two, "each slot once"),
        ([0, 1], [16], two, "one position for each slot"),
        ([0, 1], [16, 16], CanonicalStates(state, window), "one for each of 2 slots"),
        ([0, 1], [16, 16], CanonicalStates(two.states, two.windows[..., 1:]), "windows have shape"),
        ([0, 1], [16, -16], two, "must not be negative"),
        ([0, 1.5], [16, 16], two, "1.5 .index 1. is a float"),
    ):
        with pytest.raises(ContractError, match=message):
            cache.load(slots, positions, given)
        assert torch.equal(cache.memory, before)


def test_pickle() -> None:
    cache, _ = served(GDN, [5])
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(copied.memory[2], cache.memory[2]) and copied.handle is not cache.handle
        assert copied.positions([2]) == [(5, 5)] and copied.signature == cache.signature
