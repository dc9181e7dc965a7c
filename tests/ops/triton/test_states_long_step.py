"""Steps of many tokens in chunks of more than those of the slots, against the rules in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from attnlib.ops.states import RecurrenceParams, StateInputs
from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.heuristics.device import INTERPRETED, limits_of
from attnlib.ops.triton.hopper.kernels.state_channel_chunks import channel_matrices_kernel
from attnlib.ops.triton.hopper.kernels.state_serial import serial_step_kernel
from attnlib.ops.triton.states import state_step
from attnlib.ops.triton.states.launch import KernelLaunch
from attnlib.spec import StateSpec
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.serving import Part, Results, Server, Step
from tests.ops.torch.states.layers import (
    Operations,
    batch_of,
    forgetting,
    largest_error,
    layout_of,
    moved,
    wanted,
)
from tests.ops.triton.hopper.emulate import run_emulated

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 1e-2
"""Of bfloat16 outputs, as in `test_states`."""
CHUNK = state_tiles.long_chunk


@pytest.fixture(autouse=True)
def long_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of rows of the steps in long chunks. Without a GPU, Gluon is emulated."""
    if INTERPRETED:
        monkeypatch.setattr(JITFunction, "run", run_emulated)
        for kernel in (serial_step_kernel, channel_matrices_kernel):
            monkeypatch.setattr(kernel, "hash", "of functions that are interpreted")
        monkeypatch.setattr(
            state_tiles, "long_chunk", lambda layout, chip, *given: CHUNK(layout, (9, 0), *given)
        )
    elif limits_of(torch.empty(0, device=DEVICE)).capability[0] != 9:
        pytest.skip("the kernels are for Hopper")
    taken: list[int] = []

    class Noted(KernelLaunch):
        def __init__(
            self, kernel: Any, constants: Any, grid: Any, numbers: Any = (), **options: int
        ):
            super().__init__(kernel, constants, grid, numbers, **options)
            self.is_long = kernel is serial_step_kernel
            if self.is_long:
                taken.append(numbers[-1])

        def run(self, *tensors: torch.Tensor) -> None:
            assert not self.is_long or not any(x.data_ptr() % 16 for x in tensors[:3])
            super().run(*tensors)

    monkeypatch.setattr(state_step, "KernelLaunch", Noted)
    yield taken


def spec_of(name: str, **options: Any) -> StateSpec:
    given = {"conv_channels": 0, "conv_width": 0, "has_conv_bias": False, "num_heads": 2}
    given |= {"num_key_heads": 1 if name == "gated delta" else 2, "dtype": torch.bfloat16}
    return KINDS[name].replace(**{**given, "key_size": 64, "value_size": 64, **options})


def operations(spec: StateSpec, num_slots: int = 8) -> Operations:
    return Operations(spec, draw_layer(spec), "tail", num_slots, "triton", DEVICE)


def served(
    spec: StateSpec,
    length: int,
    plan: list[tuple[int, int]],
    every: int = 0,
    limit: float = LIMIT,
) -> Server:
    """A request in steps of (tokens, drafts), whose outputs are right; with `every`, one of so many
    tokens forgets those before it."""
    request = draw_tokens(spec, length, 1)
    request = forgetting(request, every) if every else request
    server = Server(spec, operations(spec), [request], [5])
    for count, drafts in plan:
        server.step([Part(0, count, drafts)])
    expected = wanted(spec, draw_layer(spec), request)
    assert largest_error(server.result(0), expected) < limit
    return server


def stored(server: Server) -> torch.Tensor:
    """The state of the request of `served`."""
    state = server.runner.slots.state
    assert state is not None
    return state[5].double()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gated delta", {}),
        ("gated delta", {"key_size": 128, "value_size": 192}),
        ("kimi delta", {"key_size": 128}),
        ("mamba2", {"key_size": 128}),
        ("lightning", {"chunk_size": 32, "value_size": 128}),
        ("gla", {"value_size": 128}),
        pytest.param("gla", {"key_size": 128, "max_rollback": 0}, marks=pytest.mark.slow),
        pytest.param("kimi delta", {"max_rollback": 7}, marks=pytest.mark.slow),
        pytest.param("mamba2", {"value_size": 256}, marks=pytest.mark.slow),
    ],
)
def test_values(
    name: str, options: dict[str, Any], long_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of tokens of the tail and of the step, that are not full, and that end at the state;
    the state is that of other steps."""
    spec = spec_of(name, **{"max_rollback": 3, **options})
    drafts = spec.max_rollback
    plan = [(20, 0), (1, min(2, drafts)), (77, drafts), (3, 0), (80, 0)]
    found = stored(served(spec, 181, plan))
    assert long_steps == [77 + drafts, 80]
    monkeypatch.setattr(state_tiles, "LONG_CHUNK", 0)
    expected = stored(served(spec, 181, plan))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert len(long_steps) == 2


@pytest.mark.parametrize("every", [3, 11])
@pytest.mark.parametrize("name", ["gated delta", "kimi delta"])
def test_tokens_that_forget(name: str, every: int, long_steps: list[int]) -> None:
    """T5: decays whose logarithms have no sum in float32."""
    served(spec_of(name), 150, [(70, 0), (80, 0)], every)
    assert long_steps == [70, 80]


@pytest.mark.slow
def test_a_state_of_bfloat16() -> None:
    spec = spec_of("gated delta", state_dtype=torch.bfloat16)
    served(spec, 200, [(130, 0), (70, 0)], limit=2 * LIMIT)


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


def test_addresses_and_strides(long_steps: list[int]) -> None:
    """Rows are copied in units of 16 bytes: inputs that begin elsewhere are moved, and those whose
    rows are not as far from each other."""
    spec, length = spec_of("mamba2"), 40
    layer, tokens = draw_layer(spec), draw_tokens(spec, length, 1)
    batch = moved(batch_of(Step([length], [length], [5])), torch.device(DEVICE))
    given = [tokens.query, tokens.key, tokens.value, tokens.log_decay, tokens.beta]
    params = RecurrenceParams(
        scale=layer.scale, update="add", qk_norm=False, skip=torch.ones(2), is_invariant=False
    )
    assert layer.skip is not None
    skip = layer.skip.to(DEVICE)  # of another layer
    outputs = []
    for shift, extra in ((0, 0), (8, 8), (4, 8), (0, 4)):
        rows = []
        for x in (each.to(DEVICE) for each in given if each is not None):
            memory = x.new_zeros(length, x[0].numel() + extra)
            found = memory[:, shift : shift + x[0].numel()]
            rows.append(found.copy_(x.flatten(1)).unflatten(1, x.shape[1:]))
        inputs = StateInputs(rows[0], rows[1], rows[2], rows[3], rows[4])
        out, slots = torch.empty_like(inputs.value), operations(spec).slots
        step = state_step.PreparedStep(inputs, slots, batch, params, out)
        step.run(inputs, slots, batch, skip, out)
        outputs.append(out.cpu())
    expected = wanted(spec, layer, tokens)
    assert largest_error(Results(None, outputs[0]), expected) < LIMIT
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert long_steps == 6 * [length]  # the last two are prepared twice


def test_who_takes_long_chunks(long_steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of bfloat16 with some sizes whose bits may depend on lengths, in long steps."""
    plain, least = spec_of("gated delta"), state_tiles.LONG_CHUNK
    served(plain, least, [(least, 0)])
    assert long_steps == [least]
    served(plain, least - 1, [(least - 1, 0)])
    for other in (
        {"dtype": torch.float16}, {"key_size": 96}, {"value_size": 32},
    ):  # fmt: skip
        served(plain.replace(**other), least, [(least, 0)])
    monkeypatch.setattr(state_tiles, "LONG_CHUNK", 0)
    served(plain, least, [(least, 0)])
    assert long_steps == [least]


@pytest.mark.parametrize("capability", [(0, 0), (8, 9), (9, 0), (10, 0)])
def test_chips(capability: tuple[int, int]) -> None:
    layout = layout_of(spec_of("gated delta"), "tail")
    is_taken = capability == (9, 0)
    assert CHUNK(layout, capability, False, 32) == 32 * is_taken
    assert CHUNK(layout, capability, True, 1) == 16 * is_taken
