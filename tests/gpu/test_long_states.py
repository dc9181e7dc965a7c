"""Long steps of state layers on a GPU, on Hopper in large chunks: values, and CUDA graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnlib.ops.states import RecurrenceParams, StateInputs
from attnlib.ops.triton.states.state_step import state_step
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.serving import Part, Server, Step
from tests.gpu.devices import needs_gpu
from tests.gpu.test_states import ERRORS, LAYERS, operations
from tests.ops.torch.states.layers import batch_of, largest_error, moved, wanted

pytestmark = [pytest.mark.gpu, needs_gpu]

LONG = ["gated delta", "kimi delta", "mamba2", "large values"]


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("name", LONG)
def test_long_steps(name: str, keys: int) -> None:
    """Steps of more than 32 tokens, of which some are taken back, beside short ones and padding."""
    spec = LAYERS[name].replace(batch_invariant=False, conv_channels=0, conv_width=0, key_size=keys)
    requests = [draw_tokens(spec, count, count) for count in (700, 90, 260)]
    server = Server(spec, operations(spec, 8), requests, [5, 2, 7], extra_rows=3)
    for parts in (
        [Part(0, 203, 2), Part(-1, 40), Part(1, 5), Part(2, 33, 3)],
        [Part(1, 1), Part(0, 497, 1), Part(2, 0)],
        [Part(2, 227), Part(1, 84, 3)],
    ):
        out = server.step(parts).out
        assert out is not None and not out[-3:].any()
    for place, request in enumerate(requests):
        expected = wanted(spec, draw_layer(spec), request)
        assert largest_error(server.result(place), expected) < ERRORS[torch.bfloat16] / 2


@pytest.mark.parametrize("name", LONG)
def test_a_graph_of_long_steps(name: str) -> None:
    """T19: replays over other lengths, slots and numbers of rows without a request."""
    spec = LAYERS[name].replace(batch_invariant=False, conv_channels=0, conv_width=0)
    layer, tokens = moved(draw_layer(spec), "cuda"), moved(draw_tokens(spec, 300, 1), "cuda")
    given = [tokens.query, tokens.key, tokens.value, tokens.log_decay, tokens.beta]
    params = RecurrenceParams(
        scale=layer.scale, update=spec.update, qk_norm=spec.qk_norm, skip=layer.skip,
        is_invariant=False,
    )  # fmt: skip
    static = moved(batch_of(Step([100, 90, 0], [100, 90, 0], [3, 1, -1])), "cuda")
    static = dataclasses.replace(static, max_query_len=300)
    outs = [torch.full_like(tokens.value, torch.nan) for _ in range(2)]
    runs = [operations(spec, 8).slots for _ in range(2)]
    state_step(StateInputs(*given), runs[0], static, params, out=outs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state_step(StateInputs(*given), runs[0], static, params, out=outs[0])
    for lengths, before, slots in (
        ([100, 90, 0], [0, 0, 0], [3, 1, -1]),
        ([170, 40, 90], [100, 90, 0], [3, 1, 6]),
        ([1, 250, 20], [270, 90, 9], [3, 6, -1]),
    ):
        ends = [a + b for a, b in zip(lengths, before, strict=True)]
        batch = moved(batch_of(Step(lengths, ends, slots)), "cuda")
        for field in ("query_start_loc", "seq_lens", "slots"):
            getattr(static, field).copy_(getattr(batch, field))
        graph.replay()
        one = dataclasses.replace(batch, max_query_len=300)
        state_step(StateInputs(*given), runs[1], one, params, out=outs[1])
        assert torch.equal(*outs) and not outs[0][sum(lengths) :].any()
