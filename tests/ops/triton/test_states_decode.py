"""Decodes whose query goes backward through the tail, against the rules in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attnlib.ops.states import RecurrenceParams
from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.state_tiles import StateChoice, kind_of_step
from attnlib.ops.triton.states import config, state_step
from attnlib.ops.triton.states.launch import KernelLaunch
from attnlib.spec import StateSpec
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.serving import Part, Server
from tests.ops.torch.states.layers import (
    Operations,
    forgetting,
    largest_error,
    layout_of,
    wanted,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 1e-5
"""Of float32, as in `test_states`."""
GROUPS = {"row decode": 16, "wide row decode": 2}


@pytest.fixture(autouse=True)
def row_decodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Row decodes also of few heads, of few rows at a time; the groups of the launches that used
    them."""
    taken: list[int] = []

    class Noted(KernelLaunch):
        def __init__(self, kernel: Any, constants: Any, *rest: Any, **options: Any) -> None:
            super().__init__(kernel, constants, *rest, **options)
            if getattr(constants, "GROUP", 0):
                taken.append(constants.GROUP)

    monkeypatch.setattr(state_step, "KernelLaunch", Noted)
    monkeypatch.setattr(
        state_tiles, "kind_of_step", lambda *facts: kind_of_step(*facts[:3], True, facts[4])
    )
    for kind, group in GROUPS.items():
        monkeypatch.setitem(state_tiles.TILES, kind, StateChoice(16, 2, group=group))
    config.state_config.cache_clear()
    yield taken
    config.state_config.cache_clear()


def spec_of(name: str, **options: Any) -> StateSpec:
    given = {"conv_channels": 0, "conv_width": 0, "has_conv_bias": False}
    return KINDS[name].replace(**{**given, **options})


def operations(spec: StateSpec, num_slots: int = 8) -> Operations:
    return Operations(spec, draw_layer(spec), "tail", num_slots, "triton", DEVICE)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kimi delta", {}),
        ("lightning", {"chunk_size": 32}),
        ("gated delta", {"key_size": 4, "value_size": 8}),  # fewer keys than a part of the state
        pytest.param("mamba2", {"dtype": torch.bfloat16}, marks=pytest.mark.slow),
        pytest.param("gated delta", {"key_size": 24, "value_size": 40}, marks=pytest.mark.slow),
        pytest.param("gla", {}, marks=pytest.mark.slow),
        pytest.param("gated delta", {"state_dtype": torch.bfloat16}, marks=pytest.mark.slow),
        pytest.param("gated delta", {"key_size": 144, "value_size": 144}, marks=pytest.mark.slow),
    ],
)
def test_values(name: str, options: dict[str, Any], row_decodes: list[int]) -> None:
    """From the first token, over the end of a chunk, and after a prefill."""
    spec = spec_of(name, **options)
    request = draw_tokens(spec, 50, 1)
    server = Server(spec, operations(spec), [request], [5])
    for count in (*[1] * 18, 30, 1, 1):
        server.step([Part(0, count)])
    expected = wanted(spec, draw_layer(spec), request)
    is_exact = spec.dtype == spec.state_dtype == torch.float32
    assert largest_error(server.result(0), expected) < (LIMIT if is_exact else 1e-2)
    assert len(row_decodes) == 20 and set(row_decodes) <= {2, 16}


@pytest.mark.parametrize("name", ["gated delta", "kimi delta"])
def test_tokens_that_forget(name: str, row_decodes: list[int]) -> None:
    """T5: decays whose logarithms have no sum in float32, over the end of a chunk."""
    spec = spec_of(name)
    request = forgetting(draw_tokens(spec, 20, 1), 5)
    server = Server(spec, operations(spec), [request], [5])
    for _ in range(20):
        server.step([Part(0, 1)])
    expected = wanted(spec, draw_layer(spec), request)
    assert largest_error(server.result(0), expected) < LIMIT and len(row_decodes) == 20


def test_many_requests_forks_and_other_slots(row_decodes: list[int]) -> None:
    """Requests at several places of their chunks, one without tokens and padding; a fork keeps
    state and tail of its source; slots and rows of nobody stay as they are and become 0."""
    spec = spec_of("gated delta", num_heads=8, num_key_heads=2, value_size=32)
    lengths = (34, 17, 16, 4)
    requests, runner = [draw_tokens(spec, n, n) for n in lengths], operations(spec)
    server = Server(spec, runner, requests, [6, 2, 3, 7], extra_rows=2)
    server.step([Part(0, 32), Part(1, 15), Part(2, 15), Part(3, 3)])
    before = runner.memory.clone()
    results = server.step([Part(-1, 1), Part(0, 1), Part(1, 1), Part(2, 0), Part(3, 1)])
    changed = (runner.memory != before).any(1)
    assert changed.nonzero().flatten().tolist() == [2, 6, 7]
    assert results.out is not None
    assert not results.out[:1].any() and not results.out[4:].any()
    fork = Server(spec, runner, requests[:3], [0, 4, 5])
    fork.done = [33, 16, 15]
    kept = runner.memory[[2, 3, 6]].clone()
    fork.step([Part(0, 1), Part(1, 1), Part(2, 1)], sources=[6, 2, 3])
    assert torch.equal(runner.memory[[2, 3, 6]], kept)
    for place, request in enumerate(requests[:3]):
        expected = wanted(spec, draw_layer(spec), request)
        rows = slice(fork.done[place] - 1, fork.done[place])
        one = fork.result(place)
        assert largest_error(one, type(expected)(None, expected.out[rows])) < LIMIT
    assert row_decodes


def test_who_takes_row_decodes(row_decodes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whose bits may depend on the batch and whose tokens all stay, one token each."""
    plain = spec_of("gated delta")

    def served(spec: StateSpec, count: int) -> None:
        Server(spec, operations(spec), [draw_tokens(spec, count, 1)], [0]).step([Part(0, count)])

    served(plain, 1)
    assert row_decodes == [2]
    served(plain, 2)
    served(plain.replace(max_rollback=1), 1)
    served(plain.replace(batch_invariant=True), 1)
    monkeypatch.setattr(state_tiles, "kind_of_step", kind_of_step)
    served(plain, 1)  # of few heads
    assert row_decodes == [2]


@pytest.mark.parametrize(
    ("options", "capability", "copies"),
    [
        ({}, (9, 0), True),
        ({"value_size": 64, "key_size": 64}, (9, 0), True),
        ({}, (8, 0), False),
        ({"key_size": 96}, (9, 0), False),
        ({"value_size": 32}, (9, 0), False),
        ({"dtype": torch.float32}, (9, 0), False),
        ({"state_dtype": torch.bfloat16}, (9, 0), False),
        ({"chunk_size": 32}, (9, 0), False),
        ({"max_rollback": 7}, (9, 0), True),
        ({"max_rollback": 8}, (9, 0), False),
    ],
)
def test_who_copies_states(
    options: dict[str, Any], capability: tuple[int, int], copies: bool
) -> None:
    """Decodes on Hopper of 16-bit inputs and float32 states whose rows fill the programs; not
    longer steps."""
    given = {"key_size": 128, "value_size": 128, "dtype": torch.bfloat16, **options}
    layout = layout_of(spec_of("gated delta", **given), "tail")
    params = RecurrenceParams(scale=1.0, update="delta", qk_norm=True, is_invariant=False)
    limits = DeviceLimits(132, 232448, 233472, capability, has_fp8=True)
    for num_reqs in (1, 256):
        tile = config.step_tile(layout, params, limits, num_reqs)
        assert tile.copies == copies
        assert not config.step_tile(layout, params, limits, num_reqs, is_long=True).copies
        assert not copies or tile.rows * tile.blocks == layout.value_size
