"""Tensors and sinks of query tokens on a GPU (M21, M22): portable kernels, the Hopper decode, and
captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.triton import TritonBackend
from attnlib.score_functions import QueryTensors
from attnlib.score_functions.builtin import relative_logits
from attnlib.spec import CudaGraphSupport
from attnlib.testing.case import Case
from attnlib.testing.conformance import run_conformance
from attnlib.testing.runner import compare_with_oracle, run_case
from attnlib.workspace import BatchLimits
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

DEVICE = torch.device("cuda")
SCORE = "attnlib.score_functions.builtin:relative_logits"


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_conformance(backend: str) -> None:
    report = run_conformance(backend, device="cuda", only="S6,S1", against=[])
    assert report.passed, str(report)


@pytest.mark.parametrize("fields", [{"score": SCORE}, {"token_sinks": True}], ids=str)
@pytest.mark.parametrize("batch", ["64q1s2100", "q1s9000_q3s700", "q300s1000_q513_q1s900"])
@pytest.mark.parametrize("kernels", ["auto", "hopper", "portable"])
def test_long_batches(kernels: str, batch: str, fields: dict[str, Any]) -> None:
    class Configured(TritonBackend):
        config = {"kernels": kernels}

    case = Case(
        batch=batch, head_size=128, num_heads=8, num_kv_heads=2, dtype="bfloat16",
        needs_lse=True, **fields,
    )  # fmt: skip
    error = compare_with_oracle(case, run_case(Configured, case, DEVICE), DEVICE)
    assert not error, error


def test_a_captured_step_reads_the_tensors_of_each_replay() -> None:
    """T6 of the capture: tensors are at fixed addresses, and lengths change."""
    spec = attnlib.AttentionSpec(
        num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, token_sinks=True,
        score_function=relative_logits(16), cudagraph=CudaGraphSupport.ALWAYS,
    )  # fmt: skip
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=256)
    layer = attnlib.Attention(spec, backend="triton", device=DEVICE)
    cache = attnlib.PagedKVCache.allocate(spec, 64, DEVICE)
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    builder = layer.backend.make_builder(spec, DEVICE, limits=limits)
    state = attnlib.AttentionState(builder, limits)
    query = torch.randn(4, 8, 64, dtype=torch.bfloat16, device=DEVICE)
    rel = torch.randn(4, 8 * 16, dtype=torch.bfloat16, device=DEVICE)
    sinks = torch.randn(4, 8, device=DEVICE)
    out = torch.empty_like(query)
    metadata = state.graph_capture_get_metadata_for_batch(4, query_len=1)
    given = QueryTensors({"rel": rel}, sinks)

    def run() -> None:
        layer(query, None, None, cache, metadata, output=out, query_tensors=given)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for lengths in ([9, 200, 31], [64, 1, 77, 250]):
        for tensor in (query, rel, sinks):
            tensor.normal_()
        table = torch.randperm(64, dtype=torch.int32).view(4, 16)[: len(lengths)]
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1] * len(lengths), lengths, table, spec.block_size, DEVICE
        )
        builder.build(0, state.begin_forward(common, 4))
        graph.replay()
        rows = len(lengths)
        part = QueryTensors({"rel": rel[:rows].clone()}, sinks[:rows].clone())
        expected = layer(
            query[:rows].clone(), None, None, cache, builder.build(0, common), query_tensors=part
        )
        torch.testing.assert_close(out[:rows], expected, rtol=2e-2, atol=2e-2)
