"""The suite `states` of `attnlib bench` on a GPU: graphs whose calls do the work of a step."""

from __future__ import annotations

import pytest
import torch

from attnlib.backends.triton import TritonBackend
from attnlib.bench.backends import BenchBackend
from attnlib.bench.measure import measure_case
from attnlib.bench.peaks import Peaks
from attnlib.bench.state_case import MODELS, StateCase
from attnlib.bench.state_runner import StateRunner
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

DEVICE = torch.device("cuda")
TRITON = BenchBackend("triton", TritonBackend)


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize(
    ("work", "query_len"), [("decode", 1), ("verify", 4), ("step", 1), ("prefill", 100)]
)
def test_rows_are_right_and_replayed(model: str, work: str, query_len: int) -> None:
    case = StateCase(model=model, work=work, num_reqs=3, query_len=query_len)
    peaks = Peaks(3000.0, 3000.0, 700.0, "none")
    (row,) = measure_case(case, [TRITON], DEVICE, peaks, graphs=True)
    assert (row.status, row.reason, row.how, row.checked) == ("ok", "", "graph", True)
    assert row.us and row.eager_us and row.layer_us and row.build_us


@torch.inference_mode()
def test_a_repeated_call_writes_outputs_and_the_state_of_a_full_chunk() -> None:
    case = StateCase(model="qwen3-next", work="decode", num_reqs=2, query_len=1)
    runner = StateRunner(case, TRITON, DEVICE)
    runner.first_calls()
    last = runner.copies - 1
    state = runner.cache.tensors.state
    assert state is not None
    for _ in range(2):
        state[runner.slots(last)] = 1.0
        runner.output.fill_(torch.nan)
        runner.attend(last)
        assert bool(runner.output.isfinite().all())
        assert not bool((state[runner.slots(last)] == 1.0).all())
