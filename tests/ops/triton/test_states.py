"""Operations on states as Triton kernels: the rules in float64, splits, drafts, forks, bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.ops.states import RecurrenceParams, StateBatch, StateInputs, StateTensors
from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.heuristics.state_tiles import TILES, StateChoice, state_tile
from attnlib.ops.triton.states.state_step import state_step
from attnlib.spec import StateSpec
from attnlib.testing.states.inputs import TokenInputs, draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.serving import Part, Results, Server, Step
from tests.ops.torch.states.layers import (
    Operations,
    forgetting,
    largest_error,
    layout_of,
    moved,
    wanted,
)

KINDS_AND_DTYPES = [
    pytest.param("gated delta", torch.float16, id="gated delta"),
    pytest.param("kimi delta", torch.float32, id="kimi delta", marks=pytest.mark.slow),
    pytest.param("mamba2", torch.float16, id="mamba2", marks=pytest.mark.slow),
    pytest.param("lightning", torch.float32, id="lightning", marks=pytest.mark.slow),
    pytest.param("gla", torch.float32, id="gla", marks=pytest.mark.slow),
    pytest.param("short convolution", torch.float16, id="short convolution"),
]
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operations(spec: StateSpec, num_slots: int = 8) -> Operations:
    return Operations(spec, draw_layer(spec), "tail", num_slots, "triton", DEVICE)


def check(spec: StateSpec, got: Results, request: TokenInputs) -> None:
    expected = wanted(spec, draw_layer(spec), request)
    assert largest_error(got, expected) < LIMITS[spec.dtype]


def alone(spec: StateSpec, request: TokenInputs) -> Results:
    """The outputs of a request in one step, in a batch of its own."""
    return operations(spec, 1).run(request, Step([len(request)], [len(request)], [0]))


def equal(one: Results, other: Results) -> bool:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("name", "dtype"), KINDS_AND_DTYPES)
def test_served_requests(name: str, dtype: torch.dtype) -> None:
    """Random steps with drafts, padding and rows past the batch: the results, and equal bits."""
    spec = KINDS[name].replace(max_rollback=3, dtype=dtype)
    rng, requests = random.Random(1), [draw_tokens(spec, n, n) for n in (36, 1, 20)]
    server = Server(spec, operations(spec), requests, [6, 2, 3], extra_rows=2)
    while any(done < len(r) for done, r in zip(server.done, requests, strict=True)):
        parts = [Part(-1, rng.randint(0, 3))]
        for place, request in enumerate(requests):
            count = min(len(request) - server.done[place], rng.choice((0, 1, 2, 4, 15)))
            parts.append(Part(place, count, rng.randint(0, 3) if count else 0))
        rng.shuffle(parts)
        server.step(parts)
    for place, request in enumerate(requests):
        check(spec, server.result(place), request)
        assert equal(server.result(place), alone(spec, request))


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": 32, "max_rollback": 0, "state_dtype": torch.bfloat16, "key_size": 72},
        {"key_size": 40, "value_size": 72, "num_heads": 2, "num_key_heads": 1},
        {"dtype": torch.bfloat16, "max_rollback": 7, "update": "add"},
        {"decay": "channel", "key_size": 48, "has_beta": False},
        {"key_size": 144, "num_heads": 2, "num_key_heads": 1},
    ],
    ids=["c 32", "head sizes", "bfloat16", "channels in two parts", "parts loaded again"],
)
@pytest.mark.slow
def test_sizes_and_dtypes(options: dict[str, Any]) -> None:
    """Chunks, several blocks of values and parts of keys, drafts across a chunk."""
    spec = KINDS["gated delta"].replace(conv_channels=0, conv_width=0, batch_invariant=True)
    spec = spec.replace(**{"max_rollback": 3, **options})
    request = draw_tokens(spec, 41, 3)
    server = Server(spec, operations(spec), [request], [5])
    drafts = spec.max_rollback
    for count in (30, 1, 1, 3, 6):
        server.step([Part(0, count, drafts)])
    if spec.state_dtype == torch.float32:
        check(spec, server.result(0), request)
    assert equal(server.result(0), alone(spec, request))


def test_fast_decays() -> None:
    """T5: no exponent is positive, so channels that lose e^-6 per token stay finite."""
    spec = KINDS["kimi delta"].replace(conv_channels=0, conv_width=0)
    request = draw_tokens(spec, 20, 0)
    assert request.log_decay is not None
    request.log_decay[:, :, ::2] = -6.0
    check(spec, alone(spec, request), request)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) for n in ("kimi delta", "gla")] + ["gated delta"],
)
@pytest.mark.parametrize("rollback", [0, 3])
def test_tokens_that_forget(name: str, rollback: int) -> None:
    """T5: decays whose logarithms have no sum in float32, in one launch and in three."""
    spec = KINDS[name].replace(conv_channels=0, conv_width=0, max_rollback=rollback)
    request = forgetting(draw_tokens(spec, 37, 1), 5)
    server = Server(spec, operations(spec), [request], [2])
    for count in (14, 1, 1, 20, 1):
        server.step([Part(0, count, rollback)])
    check(spec, server.result(0), request)


def test_a_fork_continues_in_both() -> None:
    """T12: two requests read one source, in one launch and in three; it keeps every bit."""
    spec = KINDS["gated delta"].replace(max_rollback=3)
    runner, request = operations(spec), draw_tokens(spec, 30, 5)
    Server(spec, runner, [request], [1]).step([Part(0, 19)])
    before = runner.memory[1].clone()
    forks = Server(spec, runner, [request] * 3, [4, 6, 0])
    forks.done = [19] * 3
    forks.step([Part(0, 1, 3), Part(1, 7)], sources=[1, 1])
    forks.step([Part(2, 2)], sources=[1])
    forks.step([Part(0, 3), Part(1, 2), Part(2, 1, 1)])
    assert torch.equal(runner.memory[1], before)
    expected = alone(spec, request)
    for place in range(3):
        rows = slice(19, forks.done[place])
        part = Results(*(None if x is None else x[rows] for x in expected))
        assert equal(forks.result(place), part)


@pytest.mark.parametrize(
    ("name", "kinds", "state_dtype"),
    [
        ("gated delta", ("decode", "step"), torch.float32),
        ("gated delta", ("step", "decode"), torch.bfloat16),
        ("kimi delta", ("wide decode", "step"), torch.float32),
    ],
)
def test_one_program_computes_a_head(
    monkeypatch: pytest.MonkeyPatch, name: str, kinds: tuple[str, str], state_dtype: torch.dtype
) -> None:
    """T18: decodes of few heads and of many, across the end of a chunk and of forks, give the
    slots and the outputs the same bits; 72 value rows are three passes, with a part of a last."""
    spec = KINDS[name].replace(max_rollback=0, value_size=72, dtype=torch.float16)
    spec = spec.replace(conv_channels=0, conv_width=0, state_dtype=state_dtype)
    requests, found = [draw_tokens(spec, n, n) for n in (40, 5)], []
    for kind in kinds:
        monkeypatch.setattr(
            state_tiles, "kind_of_step", lambda *facts, kind=kind: "prefill" if facts[2] else kind
        )
        runner = operations(spec)
        server = Server(spec, runner, requests, [6, 2], extra_rows=2)
        server.step([Part(0, 29), Part(1, 1)])
        for _ in range(4):
            server.step([Part(1, 1), Part(-1, 1), Part(0, 1)])
        fork = Server(spec, runner, requests[:1], [4])
        fork.done = [33]
        fork.step([Part(0, 1)], sources=[6])
        found.append([*map(server.result, range(2)), fork.result(0), runner.memory.clone()])
    *one, memory = found[0]
    *other, expected = found[1]
    assert all(map(equal, one, other)) and torch.equal(memory, expected)
    assert state_tile(16, 72, 16, "decode").passes == 4


@pytest.mark.parametrize("longest", [3, 9])
def test_other_slots_and_rows(longest: int) -> None:
    """Slots that are not named, and those of requests without tokens, keep every bit (T7, T11,
    T14); rows of no request are 0 (T3)."""
    spec = KINDS["gated delta"].replace(max_rollback=3)
    requests = [draw_tokens(spec, 30, seed) for seed in range(2)]
    runner = operations(spec)
    server = Server(spec, runner, requests, [7, 3], extra_rows=3)
    server.step([Part(0, 9), Part(1, 4)])
    before = runner.memory.clone()
    results = server.step([Part(-1, 2), Part(0, longest), Part(1, 0), Part(-1, 1)])
    changed = (runner.memory != before).any(1)
    assert changed.nonzero().flatten().tolist() == [7]
    for result in results:
        assert result is not None
        assert not result[:2].any() and not result[2 + longest :].any()
        assert result[2 : 2 + longest].any(1).all()


def test_strided_tensors() -> None:
    """S12: heads of one packed tensor, slots within larger blocks, an output with gaps."""
    spec = KINDS["gla"].replace(dtype=torch.float16)
    request, layer = draw_tokens(spec, 5, 2), draw_layer(spec)
    layout, device = layout_of(spec, "tail"), torch.device(DEVICE)
    memory = torch.zeros(3, 2 * layout.bytes_per_slot, dtype=torch.uint8, device=device)
    slots = StateTensors.from_bytes(layout, memory[:, layout.bytes_per_slot :])
    assert request.query is not None and request.key is not None and request.value is not None
    packed = torch.cat([request.query, request.key, request.value], 1).to(device)
    query, key, value = packed.split([2, 2, 4], 1)
    out = torch.full((5, 6, 2 * spec.value_size), 3.0, dtype=spec.dtype, device=device)
    batch = StateBatch(
        query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
        seq_lens=torch.tensor([5], dtype=torch.int32),
        slots=torch.tensor([2], dtype=torch.int32),
        max_query_len=5,
    )
    batch, request = moved(batch, device), moved(request, device)
    params = RecurrenceParams(scale=layer.scale, update="add")
    given = StateInputs(query, key, value, request.log_decay, None)
    state_step(given, slots, batch, params, out=out[:, 1:5, : spec.value_size])
    assert torch.equal(out[:, 1:5, : spec.value_size], alone(spec, request).out.to(device))
    assert (out[:, [0, 5]] == 3).all() and (out[..., spec.value_size :] == 3).all()
    assert not memory[:, : layout.bytes_per_slot].any() and not memory[:2].any()


def test_refusals() -> None:
    spec = KINDS["gated delta"].replace(conv_channels=0, conv_width=0)
    request, layer = draw_tokens(spec, 2, 0), draw_layer(spec)
    step = Step([2], [2], [0])
    with pytest.raises(ContractError, match="form='plain'"):
        Operations(spec, layer, "plain", 1, "triton", DEVICE).run(request, step)
    large = spec.replace(key_size=264)
    with pytest.raises(ContractError, match="heads of 264"):
        operations(large, 1).run(draw_tokens(large, 2, 0), step)
    with pytest.raises(ContractError, match="chunk_size=64; the kernels take at most 32"):
        operations(spec.replace(chunk_size=64), 1).run(request, step)
    double = TokenInputs(**{k: x.double() for k, x in request.tensors().items()})
    with pytest.raises(ContractError, match="query is torch.float64"):
        operations(spec, 1).run(double, step)


@pytest.mark.parametrize("key_size", [16, 64, 100, 128, 192, 256])
@pytest.mark.parametrize("value_size", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("kind", TILES)
def test_tiles_cover_a_head(key_size: int, value_size: int, kind: str) -> None:
    tile = state_tile(key_size, value_size, 16, kind)
    assert tile.part * tile.parts >= key_size
    assert tile.rows * tile.passes * tile.blocks >= value_size
    assert tile.blocks <= 4 and tile.rows & (tile.rows - 1) == 0 and tile.rows >= 16
    if "row" not in kind:  # T18: chips multiply 64 rows by other instructions with four warps
        assert tile.rows < 64 or tile.num_warps >= 4


@pytest.mark.parametrize("group", [0, 1, 3, 32])
@pytest.mark.parametrize("kind", ["copied row decode", "copied few row decodes"])
def test_copied_tiles_load_two_rows_or_more(
    monkeypatch: pytest.MonkeyPatch, kind: str, group: int
) -> None:
    """The kernel has two tokens of the tail in flight: with a group of 1 it reads past them."""
    monkeypatch.setitem(TILES, kind, StateChoice(64, 4, group=group, copies=True))
    with pytest.raises(AssertionError, match=f"{kind}.*group={group}"):
        state_tile(128, 128, 16, kind)
