"""`attnlib bench` on a GPU: graphs of every available backend are captured, checked and timed."""

from __future__ import annotations

import pytest
import torch

from attnlib.bench.backends import find_backends
from attnlib.bench.case_text import parse_case
from attnlib.bench.measure import measure_case
from attnlib.bench.peaks import Peaks
from attnlib.bench.timer import GraphTimer, measure_in_turn
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

CASES = (
    "q1s1k",
    "8q1s600_2q1s40",
    "4q4s1k",
    "q600",
    "2q64s1k@page=128",
    "5q1s900_q300",
    "4q1s1k@heads=64/8,d=64,window=128,sinks",
)
FP8 = "q1s500@kv=fp8_e4m3"
"""Not every GPU supports float8."""


@pytest.mark.parametrize("text", [*CASES, FP8])
def test_every_backend_is_timed_in_a_graph_or_unsupported(text: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = measure_case(
        parse_case(text),
        find_backends(None, device),
        device,
        Peaks(4000.0, 4000.0, 600.0, "none"),
        graphs=True,
    )
    assert rows[0].backend == "triton" and not rows[0].note
    assert (rows[0].status, rows[0].how) == ("ok", "graph") or (
        text == FP8 and rows[0].status == "unsupported"
    ), rows[0].reason
    for row in rows:
        assert row.status in ("ok", "unsupported"), f"{row.backend}: {row.reason}"
        if row.status == "ok":
            assert (
                row.checked
                and row.us
                and row.eager_us
                and row.write_us
                and row.build_us
                and row.layer_us
            ), f"{row.backend}: {row.note}"
            assert row.kind != "decode" or row.copies > 1, "decodes are timed on cold caches"


def test_graph_times_equal_event_times() -> None:
    """An elementwise kernel over 1 GiB, timed by a graph and by events around eager launches."""
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.empty(2**28, device=device)
    target = torch.empty_like(source)
    timer = GraphTimer(lambda copy: torch.neg(source, out=target), 1, device, 500.0)
    us = measure_in_turn({"neg": timer}, {"neg": 500.0})["neg"].us
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        torch.neg(source, out=target)
    end.record()
    torch.cuda.synchronize()
    assert us == pytest.approx(begin.elapsed_time(end) * 1e3 / 20, rel=0.1)
