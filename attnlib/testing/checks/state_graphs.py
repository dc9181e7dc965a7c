"""ST13: CUDA graphs over other lengths, slots, sources and tails (T19)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnlib.metadata.state import AttentionState
from attnlib.metadata.states import StateMetadata
from attnlib.spec import CudaGraphSupport, StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.states.cases import ROLLBACK, over_kinds
from attnlib.testing.states.inputs import TokenInputs, joined
from attnlib.testing.states.layers import LayerUnderTest, compare_result_bits, drawn
from attnlib.testing.states.serving import Results, Step
from attnlib.workspace import BatchLimits

__all__ = ["CHECKS"]


def _replays(target: BackendUnderTest, spec: StateSpec) -> str:
    """Decodes of two requests and padding in one graph, across a multiple of the chunk; the second
    request moves to another slot on the way. The bits are those of steps without a graph."""
    query_len, padded = spec.max_rollback + 1, 4
    limits = BatchLimits(max_num_reqs=padded, max_num_tokens=64, max_seq_len=256)
    eager, layer = (LayerUnderTest(target, spec, num_slots=8) for _ in range(2))
    layer.builder = target.backend.make_builder(layer.spec, target.device, limits=limits)
    tokens = [drawn(spec, 60, target.seed + seed) for seed in range(2)]
    prompt = joined([tokens[0].rows(0, 9), tokens[1].rows(0, 14)])
    for each in (eager, layer):
        each.run(prompt, Step([9, 14], [9, 14], [6, 1]))
    state = AttentionState(layer.builder, limits)
    metadata = state.graph_capture_get_metadata_for_batch(padded, query_len=query_len)
    rows = padded * query_len
    inputs = tokens[0].rows(0, rows).each(lambda x: x.to(target.device))
    captured = _Captured(layer, inputs, metadata)
    done, slots = [9, 14], [6, 1]
    for number in range(6):
        sources = list(slots)
        if number == 3:
            slots[1] = 4
        counts = (query_len, 1 + number % query_len)
        new = joined([x.rows(n, n + c) for x, n, c in zip(tokens, done, counts, strict=True)])
        done = [n + c for n, c in zip(done, counts, strict=True)]
        step = Step(list(counts), list(done), list(slots), sources)
        wanted = eager.run(new, step)
        common = layer.common(step)
        state.begin_forward(common, padded, query_len)
        got = captured.replay(new, rows)
        if message := compare_result_bits(got, wanted, f"replay {number} of a graph"):
            return message
        if not torch.equal(eager.memory, layer.memory):
            return f"replay {number} of a graph left other bytes in the slots"
    return ""


class _Captured:
    """A graph of one call of the layer."""

    def __init__(self, layer: LayerUnderTest, inputs: TokenInputs, metadata: StateMetadata) -> None:
        self.inputs = inputs
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        with torch.cuda.stream(stream), torch.no_grad():
            layer.call_on_device(inputs, metadata)  # compiles
            stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                self.results = layer.call_on_device(inputs, metadata)

    def replay(self, tokens: TokenInputs, rows: int) -> Results:
        """The outputs of the tokens of a batch; rows past it must be 0."""
        for name, given in tokens.tensors().items():
            held = self.inputs.tensors()[name]
            held.fill_(torch.nan)
            held[: len(given)] = given.to(held.device)
        self.graph.replay()
        torch.cuda.synchronize()
        count = len(tokens)
        results = Results(*(None if x is None else x.cpu() for x in self.results))
        assert all(x is None or not bool(x[count:rows].any()) for x in results), "rows past a batch"
        return Results(*(None if x is None else x[:count] for x in results))


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    for rollback in (0, ROLLBACK):
        for each in over_kinds(
            target,
            _replays,
            rollback=rollback,
            cudagraph=CudaGraphSupport.ALWAYS,
        ):
            yield CheckCase(f"{each.id}-drafts-{rollback}", each.run, state_spec=each.state_spec)


CHECKS = (Check("ST13", "states: CUDA graphs", _cases, needs_gpu=True, kind="state"),)
