"""State layers: random specs, divisions of requests into steps, drafts, forks and slots, against
the rules in float64; and the bits of batch-invariant layers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.spec import StateSpec
from attnlib.testing.conformance import make_target
from attnlib.testing.states.inputs import draw_tokens
from attnlib.testing.states.layers import (
    LayerUnderTest,
    compare_result_bits,
    compare_results,
    expected,
    part_of,
)
from attnlib.testing.states.serving import Part, Server, Step

BOUNDED = settings(
    max_examples=25,
    derandomize=True,
)
TARGET = make_target("torch", device="cpu", against=())
SLOTS = 6


@st.composite
def specs(draw: st.DrawFn) -> StateSpec:
    """Layers with a recurrence, a convolution, or both."""
    has_recurrence = draw(st.booleans())
    channels = draw(st.sampled_from([0, 5, 8])) if has_recurrence else draw(st.integers(1, 9))
    fields: dict[str, object] = {}
    if has_recurrence:
        keys = draw(st.integers(1, 2))
        fields = {
            "num_heads": keys * draw(st.integers(1, 3)),
            "num_key_heads": keys,
            "key_size": draw(st.sampled_from([1, 4, 16])),
            "value_size": draw(st.sampled_from([1, 4, 16])),
            "update": draw(st.sampled_from(["delta", "add"])),
            "decay": draw(st.sampled_from(["head", "channel", "constant"])),
            "has_beta": draw(st.booleans()),
            "has_skip": draw(st.booleans()),
            "qk_norm": draw(st.booleans()),
        }
        if fields["update"] == "delta":
            fields["qk_norm"] = True  # a delta with long keys grows without bound
    if channels:
        fields |= {
            "conv_channels": channels,
            "conv_width": draw(st.integers(2, 5)),
            "conv_activation": draw(st.sampled_from(["silu", None])),
            "has_conv_bias": draw(st.booleans()),
        }
    rollback = draw(st.sampled_from([0, 0, 1, 5]))
    spec = StateSpec(dtype=torch.float32, max_rollback=rollback, **fields)
    form = draw(st.sampled_from([f for f in ("plain", "snapshots", "tail") if spec.fits(f)]))
    return spec.replace(form=form, chunk_size=draw(st.sampled_from([16, 32])))


@st.composite
def schedules(draw: st.DrawFn) -> list[list[tuple[int, int, int]]]:
    """Steps: for each request, tokens that stay, drafts, and whether it moves to another slot."""
    part = st.tuples(st.sampled_from([0, 1, 1, 2, 7, 20]), st.integers(0, 5), st.integers(0, 1))
    return draw(st.lists(st.lists(part, min_size=2, max_size=2), min_size=1, max_size=6))


def serve(layer: LayerUnderTest, spec: StateSpec, schedule: list[list[tuple[int, int, int]]]):
    """Two requests; one that moves reads its old slot and writes a free one (T12)."""
    requests = [draw_tokens(spec, 50, 70), draw_tokens(spec, 50, 71)]
    server = Server(spec, layer, requests, [0, 1], extra_rows=1)
    free = list(range(2, SLOTS))
    for step in schedule:
        parts, sources = [], []
        for request, (stay, drafts, moves) in enumerate(step):
            stay = min(stay, len(requests[request]) - server.done[request])
            sources.append(server.slots[request])
            if moves and stay:
                free.append(server.slots[request])
                server.slots[request] = free.pop(0)
            parts.append(Part(request, stay, min(drafts, spec.max_rollback) if stay else 0))
        # The slot that one request leaves is not written by the other one in this step.
        server.step([*parts, Part(-1, 2)], [*sources, -1])
    return server


@BOUNDED
@given(spec=specs(), schedule=schedules())
def test_every_division_gives_the_results_of_the_rules(
    spec: StateSpec, schedule: list[list[tuple[int, int, int]]]
) -> None:
    layer = LayerUnderTest(TARGET, spec, num_slots=SLOTS)
    server = serve(layer, spec, schedule)
    for request, tokens in enumerate(server.requests):
        done = tokens.rows(0, server.done[request])
        if len(done):
            wanted = expected(spec, layer.tensors, done)
            assert not compare_results(spec, server.result(request), wanted, f"{spec}")


@BOUNDED
@given(spec=specs(), schedule=schedules(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_bits_do_not_depend_on_steps(
    spec: StateSpec, schedule: list[list[tuple[int, int, int]]], dtype: torch.dtype
) -> None:
    """T18, with drafts, forks, both dtypes of states and any chunk size."""
    spec = spec.replace(form="tail", batch_invariant=True, state_dtype=dtype, dtype=dtype)
    server = serve(LayerUnderTest(TARGET, spec, num_slots=SLOTS), spec, schedule)
    for request, tokens in enumerate(server.requests):
        alone = LayerUnderTest(TARGET, spec, num_slots=1, used=False)
        whole = alone.run(tokens, Step([50], [50], [0]))
        rows = part_of(whole, slice(0, server.done[request]))
        assert not compare_result_bits(server.result(request), rows, f"{spec}")


@BOUNDED
@given(spec=specs(), first=st.integers(1, 40), more=st.integers(1, 9), data=st.data())
def test_any_position_of_a_slot_can_be_exported(
    spec: StateSpec, first: int, more: int, data: st.DataObject
) -> None:
    """T8, T20: from every position that a slot names, the canonical state continues."""
    layer, tokens = LayerUnderTest(TARGET, spec, num_slots=3), draw_tokens(spec, 60, 70)
    server = Server(spec, layer, [tokens], [1])
    server.step([Part(0, first)])
    server.step([Part(0, more)])
    ((low, high),) = layer.cache.positions([1])
    assert high == first + more and low == max(first, high - spec.max_rollback)
    position = data.draw(st.integers(low, high))
    plain = spec.replace(form="snapshots")
    other = LayerUnderTest(TARGET, plain, num_slots=2)
    given_state = layer.cache.export([1], [position], log_decay=layer.layer.log_decay)
    other.cache.load([0], [position], given_state)
    got = other.run(tokens.rows(position, position + 4), Step([4], [position + 4], [0]))
    wanted, rows = expected(spec, layer.tensors, tokens), slice(position, position + 4)
    assert not compare_results(spec, got, wanted, f"{spec}", rows)


@pytest.mark.parametrize("form", ["snapshots", "tail"])
def test_only_the_last_step_can_be_taken_back(form: str) -> None:
    """T10: what an earlier step computed stays, also with room for more drafts."""
    spec = StateSpec(
        num_heads=1, key_size=4, value_size=4, dtype=torch.float32, max_rollback=6, form=form
    )
    layer = LayerUnderTest(TARGET, spec)
    server = Server(spec, layer, [draw_tokens(spec, 20, 1)], [2])
    server.step([Part(0, 9)])
    server.step([Part(0, 2)])
    assert layer.cache.positions([2]) == [(9, 11)]
