"""FlashInfer-Bench evaluates attnlib's solutions on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnlib.bench.solutions import write_solutions
from tests.bench.trace_sets import DECODE, PAGED, RAGGED, write_trace_set
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def test_every_solution_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runner builds the solution, compares it with the reference, and times both."""
    pytest.importorskip("flashinfer_bench")
    from flashinfer_bench.bench import Benchmark, BenchmarkConfig
    from flashinfer_bench.data import TraceSet

    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    root = write_trace_set(tmp_path / "set")
    (root / "workloads" / "gemm.jsonl").unlink()  # attnlib has no solution for it
    write_solutions(root, root / "solutions")
    config = BenchmarkConfig(warmup_runs=2, iterations=5, num_trials=1)
    result = Benchmark(TraceSet.from_path(str(root)), config).run_all(dump_traces=False)
    traces = {name: traces[0] for name, traces in result.traces.items()}
    assert traces.keys() == {DECODE, PAGED, RAGGED}
    for name, trace in traces.items():
        assert trace.evaluation is not None
        assert trace.evaluation.status.value == "PASSED", (name, trace.evaluation.log)
        assert trace.evaluation.performance.latency_ms > 0
