"""Operations on states against the rules in float64: splits, batches, drafts, forks, bits."""

from __future__ import annotations

import random

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.oracle import recurrence
from attnlib.testing.states.serving import Part, Results, Server, Step

from .layers import Operations, forgetting, largest_error, wanted

FORMS = ("plain", "snapshots", "tail")
CASES = [
    (name, form, rollback)
    for name in KINDS
    for form in FORMS
    for rollback in (0, 3)
    if KINDS[name].replace(max_rollback=rollback).fits(form)
]


def served(name: str, form: str, rollback: int, seed: int, dtype: torch.dtype = torch.float32):
    """Three requests in random steps with drafts, padding and rows past the batch."""
    spec = KINDS[name].replace(max_rollback=rollback, dtype=dtype)
    layer, rng = draw_layer(spec), random.Random(seed)
    requests = [draw_tokens(spec, count, seed + place) for place, count in enumerate((53, 1, 37))]
    runner = Operations(spec, layer, form)
    server = Server(spec, runner, requests, rng.sample(range(8), 3), extra_rows=2)
    while any(done < len(r) for done, r in zip(server.done, requests, strict=True)):
        parts = [Part(-1, rng.randint(0, 3))]
        for place, request in enumerate(requests):
            left = len(request) - server.done[place]
            count = min(left, rng.choice((0, 1, 1, 2, 5, 19)))
            drafts = rng.randint(0, rollback) if count else 0
            parts.append(Part(place, count, drafts))
        rng.shuffle(parts)
        server.step(parts)
    return spec, layer, server


@pytest.mark.parametrize(("name", "form", "rollback"), CASES)
def test_served_requests(name: str, form: str, rollback: int) -> None:
    """Every division of a request gives the outputs of the rules."""
    for seed in range(2):
        spec, layer, server = served(name, form, rollback, seed)
        for place, request in enumerate(server.requests):
            assert largest_error(server.result(place), wanted(spec, layer, request)) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gated delta", "kimi delta", "gla"])
def test_tokens_that_forget(name: str, form: str) -> None:
    """T5: decays whose logarithms have no sum in float32."""
    spec = KINDS[name].replace(conv_channels=0, conv_width=0)
    layer, request = draw_layer(spec), forgetting(draw_tokens(spec, 53, 1), 5)
    server = Server(spec, Operations(spec, layer, form), [request], [2])
    for count in (30, 1, 1, 21):
        server.step([Part(0, count)])
    assert largest_error(server.result(0), wanted(spec, layer, request)) < 1e-5


def test_an_error_of_nan_is_the_largest() -> None:
    ones, wrong = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert not largest_error(Results(ones, wrong), Results(ones, ones)) < 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs(dtype: torch.dtype) -> None:
    spec, layer, server = served("gated delta", "tail", 3, 0, dtype)
    for place, request in enumerate(server.requests):
        got = server.result(place)
        assert got.out is not None and got.out.dtype == dtype
        limit = 2e-3 if dtype == torch.float16 else 1e-2
        assert largest_error(got, wanted(spec, layer, request)) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_tail_has_the_same_bits_in_every_batch(name: str, dtype: torch.dtype) -> None:
    """T18: steps, batches and drafts change no bit."""
    for seed in range(2):
        spec, layer, server = served(name, "tail", 3, seed, dtype)
        for place, request in enumerate(server.requests):
            alone = Operations(spec, layer, "tail", 1).run(
                request, Step([len(request)], [len(request)], [0])
            )
            for a, b in zip(server.result(place), alone, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)


ROUNDED = {
    "plain": [(0, 7), (7, 20), (20, 33)],
    "snapshots": [(place, place + 1) for place in range(33)],
    "tail": [(0, 16), (16, 32), (32, 33)],
}
"""Form -> the parts of a request in steps that end at 7, 20 and 33, behind which states are
rounded."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gated delta", "kimi delta", "mamba2"])
def test_states_are_rounded_where_the_form_stores_them(name: str, form: str) -> None:
    """T9, T13: the outputs are those of states that are rounded there, and of no others."""
    spec = KINDS[name].replace(conv_channels=0, conv_width=0, has_conv_bias=False, form=form)
    spec = spec.replace(state_dtype=torch.bfloat16, max_rollback=int(form == "snapshots"))
    layer, request = draw_layer(spec), draw_tokens(spec, 33, 5)
    ends = (7, 20, 33) if form != "snapshots" else range(1, 34)
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        server = Server(
            spec, Operations(spec.replace(state_dtype=dtype), layer, form), [request], [1]
        )
        for end in ends:
            server.step([Part(0, end - server.done[0])])
        found[dtype] = server.result(0).out.double()
    state, outs = None, []
    for first, end in ROUNDED[form]:
        part = request.rows(first, end)
        given = part.query, part.key, part.value, part.log_decay, part.beta
        out, state = recurrence(spec, *given, scale=layer.scale, skip=layer.skip, initial=state)
        state = state.to(torch.bfloat16).double()
        outs.append(out)
    expected = torch.cat(outs)
    exact = wanted(spec, layer, request).out
    assert (found[torch.float32] - exact).abs().max() < 1e-5 * exact.abs().max()
    # A number between two of bfloat16 may be rounded to the other one.
    assert (found[torch.bfloat16] - expected).abs().max() < 0.2 * (expected - exact).abs().max()


@pytest.mark.parametrize(("name", "form", "rollback"), CASES)
def test_every_accepted_prefix(name: str, form: str, rollback: int) -> None:
    """T10: all drafts of a step may be taken back, also where it crosses a chunk."""
    spec = KINDS[name].replace(max_rollback=rollback)
    layer, request = draw_layer(spec), draw_tokens(spec, 24, 5)
    for context in (0, 1, 14, 15, 16, 17):
        for drafts in range(rollback + 1):
            server = Server(spec, Operations(spec, layer, form), [request], [2])
            if context:
                server.step([Part(0, context)])
            server.step([Part(0, 1, drafts)])
            server.step([Part(0, 2)])
            done = request.rows(0, server.done[0])
            assert largest_error(server.result(0), wanted(spec, layer, done)) < 1e-5


@pytest.mark.parametrize(("name", "form", "rollback"), CASES)
def test_a_fork_continues_in_both(name: str, form: str, rollback: int) -> None:
    """T12: two requests read one source; it keeps every bit and serves a third one later."""
    spec = KINDS[name].replace(max_rollback=rollback)
    layer, request = draw_layer(spec), draw_tokens(spec, 40, 5)
    runner = Operations(spec, layer, form)
    Server(spec, runner, [request], [1]).step([Part(0, 19)])
    before = runner.memory[1].clone()
    forks = Server(spec, runner, [request] * 3, [4, 6, 0])
    forks.done = [19] * 3
    forks.step([Part(0, 1, rollback), Part(1, 7)], sources=[1, 1])
    forks.step([Part(0, 3), Part(1, 2)])
    forks.step([Part(2, 5)], sources=[1])
    assert torch.equal(runner.memory[1], before)
    expected = wanted(spec, layer, request)
    for place in range(3):
        rows = slice(19, forks.done[place])
        part = Results(*(None if x is None else x[rows] for x in expected))
        assert largest_error(forks.result(place), part) < 1e-5


@pytest.mark.parametrize(("name", "form", "rollback"), CASES)
def test_other_slots_and_rows(name: str, form: str, rollback: int) -> None:
    """Slots that are not named, and those of requests without tokens, keep every bit (T7, T11,
    T14); rows of no request are 0 (T3)."""
    spec = KINDS[name].replace(max_rollback=rollback)
    layer, requests = draw_layer(spec), [draw_tokens(spec, 30, seed) for seed in range(3)]
    runner = Operations(spec, layer, form)
    server = Server(spec, runner, requests, [7, 3, 5], extra_rows=3)
    server.step([Part(0, 9), Part(1, 4)])
    before = runner.memory.clone()
    results = server.step([Part(-1, 2), Part(0, 3), Part(1, 0), Part(-1, 0), Part(-1, 1)])
    same = (runner.memory == before).all(1)
    assert [place for place in range(8) if not same[place]] == [7]
    for result in results:
        if result is not None:
            assert not result[[0, 1, 5, 6, 7, 8]].any() and result[2:5].any()


def refused(runner: Operations, step: Step, message: str, rule: str) -> None:
    """The step raises and writes nothing."""
    before = runner.memory.clone()
    inputs = draw_tokens(runner.spec, sum(step.query_lens), 1)
    with pytest.raises(ContractError, match=message) as error:
        runner.run(inputs, step)
    assert error.value.rule == rule and torch.equal(runner.memory, before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gla", "short convolution"])
def test_wrong_slots_and_positions(name: str, form: str) -> None:
    spec = KINDS[name].replace(max_rollback=0 if form == "plain" else 2)
    runner = Operations(spec, draw_layer(spec), form)
    Server(spec, runner, [draw_tokens(spec, 20, 0)], [1]).step([Part(0, 20)])
    refused(runner, Step([1, 1], [1, 1], [0, 8]), r"state_slots\[1\]=8 is outside the pool", "T7")
    refused(runner, Step([1, 1], [1, 1], [4, 4]), "are both 4", "T7")
    refused(runner, Step([1], [21], [0], [9]), r"state_sources\[0\]=9 is outside", "T7")
    refused(
        runner, Step([1, 1], [1, 21], [1, 2], [0, 1]), r"state_sources\[1\]=1 is the slot", "T12"
    )
    refused(runner, Step([1], [22], [1]), "continues from 21 tokens, and the", "T8")
    far = 20 - spec.max_rollback - 1
    refused(runner, Step([1], [far + 1], [1]), f"continues from {far} tokens", "T8")
