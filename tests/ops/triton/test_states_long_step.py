"""Steps of many tokens in chunks of more than those of the slots, against the rules in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.heuristics.device import INTERPRETED, limits_of
from attnlib.ops.triton.hopper.kernels.state_long import long_step_kernel
from attnlib.ops.triton.states import state_step
from attnlib.ops.triton.states.launch import KernelLaunch
from attnlib.spec import StateSpec
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.serving import Part, Server
from tests.ops.torch.states.layers import Operations, forgetting, largest_error, wanted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 1e-2
"""Of bfloat16 outputs, as in `test_states`."""


@pytest.fixture(autouse=True)
def long_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of rows of the steps in long chunks."""
    if not INTERPRETED and limits_of(torch.empty(0, device=DEVICE)).capability[0] != 9:
        pytest.skip("the kernels are for Hopper")
    taken: list[int] = []

    class Noted(KernelLaunch):
        def __init__(
            self, kernel: Any, constants: Any, grid: Any, numbers: Any = (), **options: int
        ):
            super().__init__(kernel, constants, grid, numbers, **options)
            if kernel is long_step_kernel:
                taken.append(numbers[-1])

    monkeypatch.setattr(state_step, "KernelLaunch", Noted)
    yield taken


def spec_of(name: str, **options: Any) -> StateSpec:
    given = {"conv_channels": 0, "conv_width": 0, "has_conv_bias": False}
    return KINDS[name].replace(**{"dtype": torch.bfloat16, **given, **options})


def operations(spec: StateSpec, num_slots: int = 8) -> Operations:
    return Operations(spec, draw_layer(spec), "tail", num_slots, "triton", DEVICE)


def served(spec: StateSpec, length: int, plan: list[tuple[int, int]], every: int = 0) -> float:
    """The largest error of a request in steps of (tokens, drafts); with `every`, one of so many
    tokens forgets those before it."""
    request = draw_tokens(spec, length, 1)
    request = forgetting(request, every) if every else request
    server = Server(spec, operations(spec), [request], [5])
    for count, drafts in plan:
        server.step([Part(0, count, drafts)])
    expected = wanted(spec, draw_layer(spec), request)
    return largest_error(server.result(0), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gated delta", {}),
        ("kimi delta", {}),
        ("gla", {"key_size": 96}),
        pytest.param("gla", {"key_size": 40}, marks=pytest.mark.slow),
        pytest.param("mamba2", {}, marks=pytest.mark.slow),
        pytest.param("lightning", {"chunk_size": 32}, marks=pytest.mark.slow),
        pytest.param("gated delta", {"key_size": 40, "value_size": 72}, marks=pytest.mark.slow),
    ],
)
def test_values(name: str, options: dict[str, Any], long_steps: list[int]) -> None:
    """Chunks from the tail and from the step, that are not full, and that end at the state."""
    spec = spec_of(name, max_rollback=3, **options)
    plan = [(20, 0), (1, 2), (77, 3), (3, 0), (80, 0)]
    assert served(spec, 181, plan) < LIMIT
    assert long_steps == [80, 80]


@pytest.mark.parametrize("every", [3, 11])
@pytest.mark.parametrize("name", ["gated delta", "kimi delta"])
def test_tokens_that_forget(name: str, every: int, long_steps: list[int]) -> None:
    """T5: decays whose logarithms have no sum in float32."""
    assert served(spec_of(name), 150, [(70, 0), (80, 0)], every) < LIMIT
    assert long_steps == [70, 80]


@pytest.mark.slow
def test_a_state_of_bfloat16() -> None:
    spec = spec_of("gated delta", state_dtype=torch.bfloat16)
    assert served(spec, 200, [(130, 0), (70, 0)]) < 2 * LIMIT


def test_requests_forks_and_other_slots(long_steps: list[int]) -> None:
    """A batch of a long request, a short one, one without tokens and padding; a fork at the state
    that it keeps; slots and rows of nobody stay as they are and become 0."""
    spec = spec_of("gated delta", max_rollback=0, num_heads=2, num_key_heads=1)
    requests, runner = [draw_tokens(spec, n, n) for n in (100, 40, 9)], operations(spec)
    server = Server(spec, runner, requests, [6, 2, 3], extra_rows=2)
    server.step([Part(1, 32), Part(2, 4)])
    before = runner.memory.clone()
    results = server.step([Part(-1, 2), Part(0, 70), Part(1, 1), Part(2, 0)])
    changed = (runner.memory != before).any(1)
    assert changed.nonzero().flatten().tolist() == [2, 6]
    assert results.out is not None
    assert not results.out[:2].any() and not results.out[73:].any()
    fork = Server(spec, runner, [requests[0], requests[1]], [0, 4])
    fork.done = [70, 33]
    kept = runner.memory[[2, 6]].clone()
    fork.step([Part(0, 30), Part(1, 7)], sources=[6, 2])
    fork.step([Part(1, 0)])
    assert torch.equal(runner.memory[[2, 6]], kept)
    for place, request in enumerate(requests[:2]):
        rows = slice(fork.done[place] - (30, 7)[place], fork.done[place])
        expected = wanted(spec, draw_layer(spec), request)
        one = fork.result(place)
        assert largest_error(one, type(expected)(None, expected.out[rows])) < LIMIT
    assert long_steps == [38, 75]


def test_who_takes_long_chunks(long_steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of bfloat16 whose bits may depend on lengths, in long steps."""
    plain, least = spec_of("gated delta"), state_tiles.LONG_CHUNK
    assert served(plain, least, [(least, 0)]) < LIMIT and long_steps == [least]
    served(plain, least - 1, [(least - 1, 0)])
    served(plain.replace(batch_invariant=True), least, [(least, 0)])
    served(plain.replace(dtype=torch.float16), least, [(least, 0)])
    monkeypatch.setattr(state_tiles, "LONG_CHUNK", 0)
    served(plain, least, [(least, 0)])
    assert long_steps == [least]
