"""`attnlib bench` on a GPU: graphs are captured, replayed, judged and timed, for every backend that is here."""

from __future__ import annotations

import pytest
import torch

from attnlib.bench.backends import find_contenders
from attnlib.bench.case import parse_case
from attnlib.bench.measure import measure_case
from attnlib.bench.peaks import Ceilings
from attnlib.bench.timer import GraphWatch, take_turns
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
"""Not every GPU has it."""


@pytest.mark.parametrize("text", [*CASES, FP8])
def test_every_backend_is_timed_by_graphs_or_says_why_not(text: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = measure_case(
        parse_case(text),
        find_contenders(None, device),
        device,
        Ceilings(4000.0, 4000.0, 600.0, "none"),
        graphs=True,
    )
    assert rows[0].backend == "triton" and not rows[0].note
    assert (rows[0].status, rows[0].how) == ("ok", "graph") or (
        text == FP8 and rows[0].status == "refused"
    ), rows[0].reason
    for row in rows:
        assert row.status in ("ok", "refused"), f"{row.backend}: {row.reason}"
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


def test_a_graphs_time_is_the_events_time() -> None:
    """An elementwise kernel over a GiB, timed by the stopwatch and by events around eager launches, within a tenth."""
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.empty(2**28, device=device)
    target = torch.empty_like(source)
    watch = GraphWatch(lambda copy: torch.neg(source, out=target), 1, device, 500.0)
    us = take_turns({"neg": watch}, {"neg": 500.0})["neg"].us
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        torch.neg(source, out=target)
    end.record()
    torch.cuda.synchronize()
    assert us == pytest.approx(begin.elapsed_time(end) * 1e3 / 20, rel=0.1)
