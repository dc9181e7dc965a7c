"""`benchmarks/hosts/step_profile.py`: windows of an engine that is not vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.hosts.step_profile import Event, Step, lines, profile_window, summary

SCHEDULED = [(2, 40), (3, 10), *[(3, 3)] * 6, (0, 0)]
"""Requests and tokens of each step."""


class Engine:
    """An engine that multiplies matrices."""

    def __init__(self) -> None:
        self.planned = iter(SCHEDULED)
        self.scheduler = SimpleNamespace(schedule=self.schedule)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
        self.step = self.own_step

    def schedule(self) -> Any:
        requests, tokens = next(self.planned)
        numbers = dict.fromkeys(range(requests), tokens // max(1, requests))
        return SimpleNamespace(num_scheduled_tokens=numbers, total_num_scheduled_tokens=tokens)

    def own_step(self) -> Any:
        self.scheduler.schedule()
        return torch.ones(4, 4) @ torch.ones(4, 4)

    def generate(self) -> None:
        self.planned = iter(SCHEDULED)
        for _ in SCHEDULED:
            self.step()


def test_a_window_of_steps() -> None:
    engine = Engine()
    llm = SimpleNamespace(llm_engine=engine)
    found = profile_window(llm, engine.generate, 1, 4)
    assert {kind: row["steps"] for kind, row in found["kinds"].items()} == {
        "mixed": 1,
        "decodes": 3,
    }
    assert found["kinds"]["mixed"]["tokens"] == 10
    assert found["untraced"]["decodes"]["steps"] == 3
    assert any("own_step" in name for name, _, _ in found["functions"])
    assert engine.step == engine.own_step and engine.scheduler.schedule == engine.schedule
    row = {"workload": "short", "backend": "CUSTOM", **found}
    shown = "\n".join(lines([row, {**row, "backend": "OTHER", "functions": []}]))
    assert "own_step" in shown and "CUSTOM" in shown and "OTHER" in shown
    with pytest.raises(ValueError, match="the call has 9 steps; the window ends at 12"):
        profile_window(llm, engine.generate, 8, 4)


def test_times_of_steps() -> None:
    """Kernels that overlap count once, and gaps between kernels belong to the step after them."""
    steps = [Step(1, 50, 0, 0), Step(1, 1, 0, 0), Step(2, 2, 0, 0)]
    marks = [Event(start, start + 90, f"step of the engine {i}", False)
             for i, start in enumerate((0.0, 100.0, 200.0))]  # fmt: skip
    events = [
        *marks, Event(0.0, 95.0, "step of the engine 0", True),
        Event(10.0, 50.0, "gemm", True), Event(40.0, 60.0, "attend", True),
        Event(110.0, 130.0, "attend", True), Event(210.0, 250.0, "attend", True),
        Event(105.0, 109.0, "cudaGraphLaunch", False), Event(105.0, 109.0, "aten::mm", False),
        Event(205.0, 207.0, "cudaGraphLaunch", False),
    ]  # fmt: skip
    kinds = summary(steps, events)["kinds"]
    mixed, decodes = kinds["mixed"], kinds["decodes"]
    assert (mixed["gpu_us"], mixed["gpu_idle_us"], mixed["traced_us"]) == (50, 0, 100)
    assert mixed["kernels"] == [["gemm", 1.0, 40.0], ["attend", 1.0, 20.0]]
    assert (decodes["gpu_us"], decodes["gpu_idle_us"]) == (30, 65)
    assert decodes["kernels"] == [["attend", 1.0, 30.0]]
    assert decodes["calls"] == [["cudaGraphLaunch", 1.0, 3.0]]
    assert decodes["requests"] == 1.5 and decodes["gpu_share"] == round(60 / 190, 3)
