"""State layers on a GPU: equal bits of splits, batches and drafts; CUDA graphs across a fold."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import attnlib
from attnlib.backends.triton import TritonBackend
from attnlib.device import resolve_device
from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.heuristics.state_tiles import TILES, StateChoice
from attnlib.ops.triton.states import config
from attnlib.selection import load_backend
from attnlib.spec import CudaGraphSupport, StateSpec
from attnlib.testing.checks.state_fused import drawn_step
from attnlib.testing.conformance import run_conformance
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.serving import Part, Server, Step
from attnlib.workspace import BatchLimits
from tests.gpu.devices import needs_gpu
from tests.ops.torch.states.layers import Operations, largest_error, wanted

pytestmark = [pytest.mark.gpu, needs_gpu]

GDN = StateSpec(
    num_heads=4,
    num_key_heads=2,
    key_size=128,
    value_size=128,
    qk_norm=True,
    conv_channels=512,
    conv_width=4,
    dtype=torch.bfloat16,
    max_rollback=3,
    batch_invariant=True,
    cudagraph=CudaGraphSupport.ALWAYS,
)
LAYERS = {
    "gated delta": GDN,
    "float16, bfloat16 state": GDN.replace(dtype=torch.float16, state_dtype=torch.bfloat16),
    "float32": GDN.replace(dtype=torch.float32),
    "kimi delta": GDN.replace(num_key_heads=4, decay="channel"),
    "c 32": GDN.replace(chunk_size=32, max_rollback=0),
    "mamba2": GDN.replace(update="add", qk_norm=False, value_size=64, has_skip=True),
    "large heads": GDN.replace(key_size=256, value_size=256),
    "large values": GDN.replace(value_size=256),
}
COPIED = [kind for kind in TILES if kind.startswith("copied")]
ERRORS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def operations(spec: StateSpec, num_slots: int) -> Operations:
    return Operations(spec, draw_layer(spec), "tail", num_slots, "triton", "cuda")


@pytest.mark.parametrize("name", LAYERS)
def test_bits_of_splits_batches_and_drafts(name: str) -> None:
    """T18: prefills, decodes and verification give a token the same bits."""
    spec = LAYERS[name]
    requests = [draw_tokens(spec, count, count) for count in (333, 1, 150)]
    server = Server(spec, operations(spec, 8), requests, [5, 2, 7], extra_rows=2)
    drafts, turn = spec.max_rollback, 0
    while any(done < len(r) for done, r in zip(server.done, requests, strict=True)):
        longest = (1, 2, 1, 4, 1, 37)[turn % 6]
        counts = [
            min(len(r) - done, longest) for done, r in zip(server.done, requests, strict=True)
        ]
        parts = [
            Part(place, count, (turn + place) % (drafts + 1) if count else 0)
            for place, count in enumerate(counts)
        ]
        server.step([*parts, Part(-1, turn % 3)])
        turn += 1
    for place, request in enumerate(requests):
        got = server.result(place)
        assert largest_error(got, wanted(spec, draw_layer(spec), request)) < ERRORS[spec.dtype]
        alone = operations(spec, 1).run(request, Step([len(request)], [len(request)], [0]))
        for a, b in zip(got, alone, strict=True):
            assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("tile", [(64, 2), (128, 4), (64, 4), (32, 2)])
@pytest.mark.parametrize("name", ["gated delta", "kimi delta", "mamba2", "float16", "64 keys"])
def test_copied_decodes(name: str, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """States that go through shared memory: over ends of chunks, of several requests and a fork,
    beside padding, within the errors of bfloat16."""
    more = {"float16": GDN.replace(dtype=torch.float16), "64 keys": GDN.replace(key_size=64)}
    spec = {**LAYERS, **more}[name].replace(
        max_rollback=0, batch_invariant=False, conv_channels=0, conv_width=0
    )
    choice = StateChoice(*tile, group=4, copies=True)
    monkeypatch.setattr(state_tiles, "TILES", {**TILES, **dict.fromkeys(COPIED, choice)})
    config.state_config.cache_clear()
    requests = [draw_tokens(spec, count, count) for count in (70, 40, 55)]
    runner = operations(spec, 8)
    server = Server(spec, runner, requests, [5, 2, 7], extra_rows=2)
    server.step([Part(0, 20), Part(1, 1), Part(2, 3)])
    for _ in range(33):
        results = server.step([Part(0, 1), Part(-1, 1), Part(1, 1), Part(2, 1)])
        assert results.out is not None and not results.out[1].any() and not results.out[4:].any()
    fork = Server(spec, runner, requests, [0, 4, 6])
    fork.done = list(server.done)
    kept = runner.memory[[5, 2, 7]].clone()
    fork.step([Part(0, 1), Part(2, 1)], sources=[5, 7])
    assert torch.equal(runner.memory[[5, 2, 7]], kept)
    fork.step([Part(0, 14), Part(2, 14)])
    for one in (server, fork):
        for place, request in enumerate(requests):
            if not one.outputs[place]:
                continue
            got, expected = one.result(place), wanted(spec, draw_layer(spec), request)
            assert got.out is not None and expected.out is not None
            rows = slice(one.done[place] - len(got.out), one.done[place])
            expected = type(expected)(None, expected.out[rows])
            assert largest_error(got, expected) < ERRORS[torch.bfloat16] / 2
    config.state_config.cache_clear()


@pytest.mark.parametrize("drafts", [3, 7])
@pytest.mark.parametrize("name", ["gated delta", "kimi delta", "mamba2"])
def test_copied_drafts(name: str, drafts: int) -> None:
    """T10: steps of up to D + 1 tokens whose states go through shared memory, over ends of chunks
    and forks, beside longer ones."""
    spec = LAYERS[name].replace(
        max_rollback=drafts, batch_invariant=False, conv_channels=0, conv_width=0
    )
    requests = [draw_tokens(spec, count, count) for count in (90, 57, 71)]
    runner, rng = operations(spec, 8), random.Random(drafts)
    servers = [Server(spec, runner, requests, [5, 2, 7], extra_rows=2)]
    servers[0].serve_all(rng) if drafts == 7 else servers[0].step([Part(0, 13), Part(2, 5)])
    for slots in ([0, 4, 6], [5, 2, 7]) if drafts == 3 else ():
        server, source = Server(spec, runner, requests, slots, extra_rows=2), servers[-1]
        server.done, sources = list(source.done), [-1, *source.slots]
        for _ in range(11):
            parts = [Part(-1, 2)]
            for request in range(3):
                stay = min(rng.randint(1, 4), server.left(request))
                parts.append(Part(request, stay, rng.randint(0, 4 - stay) if stay else 0))
            server.step(parts, sources)
            sources = None
        servers.append(server)
    for one in servers:
        for place, request in enumerate(requests):
            if one.outputs[place]:
                got, expected = one.result(place), wanted(spec, draw_layer(spec), request)
                assert got.out is not None and expected.out is not None
                rows = slice(one.done[place] - len(got.out), one.done[place])
                expected = type(expected)(None, expected.out[rows])
                assert largest_error(got, expected) < ERRORS[torch.bfloat16] / 2


def test_a_graph_serves_every_length() -> None:
    """T19: one captured decode, replayed over other slots and tail lengths and across folds."""
    spec, steps, device = GDN.replace(max_rollback=0), 40, torch.device("cuda")
    own, tokens = draw_layer(spec), draw_tokens(spec, 3 * steps, 1)
    inputs = {name: x.to(device).unflatten(0, (steps, 3)) for name, x in tokens.tensors().items()}
    with attnlib.use_backend("triton"):
        layer = attnlib.StateLayer(spec, conv_weight=own.conv_weight.to(device), device=device)
    caches = [attnlib.StateCache.allocate(layer.spec, 8, device=device) for _ in range(2)]
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=4096)
    builder = layer.backend.make_builder(layer.spec, device, limits=limits)
    state = layer.backend.get_state_cls()(builder, limits)
    static = {
        name: torch.zeros(4, *x.shape[2:], dtype=x.dtype, device=device)
        for name, x in inputs.items()
    }
    names = ("query", "key", "value", "log_decay", "beta")

    def run(given: dict[str, torch.Tensor], cache: attnlib.StateCache, metadata: object):
        convolved = layer.convolve(given["x"], cache, metadata)
        return convolved, layer(*(given[name] for name in names), cache, metadata)

    captured = state.graph_capture_get_metadata_for_batch(4)
    run(static, caches[0], captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run(static, caches[0], captured)
    for step in range(steps):
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1, 1, 1], [step + 1] * 3, device=device, state_slots=[6, 1, 3]
        )
        for name, x in inputs.items():
            static[name][:3] = x[step]
        state.begin_forward(common, 4, 1)
        graph.replay()
        rows = {name: x[step] for name, x in inputs.items()}
        eager = run(rows, caches[1], builder.build(0, common))
        for ours, theirs in zip(replayed, eager, strict=True):
            assert torch.equal(ours[:3], theirs) and not ours[3].any(), step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fla", "flashinfer_gdn"])
def test_the_adapters_conform(name: str) -> None:
    """Over the installed packages."""
    if reasons := load_backend(name).unavailable(resolve_device("cuda")):
        pytest.skip("; ".join(reasons))
    report = run_conformance(name, device="cuda", quick=True, against=[])
    assert report.passed, str(report)


@pytest.mark.parametrize("check", ["ST13", "ST15", "ST16", "ST17"])
def test_checks(check: str) -> None:
    """Graphs of both operations; fused steps have the bits of separate launches."""
    report = run_conformance(TritonBackend, device="cuda", only=check)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", ["gated delta", "kimi delta", "mamba2"])
def test_a_graph_of_fused_steps(name: str) -> None:
    """T19: one captured decode, replayed over other slots and tails, has the bits of eager steps;
    the norm leaves its counters at zero."""
    device, small = torch.device("cuda"), LAYERS[name]
    keys, values = small.num_key_heads * 128, small.num_heads * small.value_size
    spec = small.replace(max_rollback=0, conv_channels=2 * keys + values)
    drawn = drawn_step(spec, 120, 1)
    named = {k: x.to(device) for k, x in vars(drawn.form).items() if torch.is_tensor(x)}
    form, own = dataclasses.replace(drawn.form, **named), draw_layer(spec)
    tensors = {
        key: None if x is None else x.to(device) for key, x in vars(own).items() if key != "scale"
    }
    with attnlib.use_backend("triton"):
        layer = attnlib.StateLayer(spec, device=device, **tensors)
    caches = [attnlib.StateCache.allocate(layer.spec, 8, device=device) for _ in range(2)]
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=4096)
    builder = layer.backend.make_builder(layer.spec, device, limits=limits)
    state = layer.backend.get_state_cls()(builder, limits)
    inputs = [None if x is None else x.to(device).unflatten(0, (40, 3)) for x in drawn[:4]]
    static = [None if x is None else x.new_zeros(4, *x.shape[2:]) for x in inputs]

    def run(given: list[torch.Tensor | None], cache: attnlib.StateCache, metadata: object):
        x, a, b, z = given
        return layer.step(x, (a, b), z, form, cache, metadata)

    captured = state.graph_capture_get_metadata_for_batch(4)
    run(static, caches[0], captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run(static, caches[0], captured)
    for step in range(40):
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1, 1, 1], [step + 1] * 3, device=device, state_slots=[6, 1, 3]
        )
        for held, new in zip(static, inputs, strict=True):
            if held is not None:
                held[:3] = new[step]
        state.begin_forward(common, 4, 1)
        graph.replay()
        rows = [None if x is None else x[step] for x in inputs]
        eager = run(rows, caches[1], builder.build(0, common))
        assert torch.equal(replayed[:3], eager) and not replayed[3].any(), step
    assert not caches[0].tensors.counters.any()
