"""What the steps of an engine of vLLM spend their time on, on the host and on the GPU.

    python benchmarks/hosts/vllm_throughput.py --backend CUSTOM ... --profile a.jsonl
    python benchmarks/hosts/vllm_throughput.py --backend FLASH_ATTN_MLA ... --profile b.jsonl
    python benchmarks/hosts/step_profile.py a.jsonl b.jsonl  # both side by side

A window is a range of the steps of one call. Its steps are of two kinds, "decodes" of one token of
each request, and "mixed". A kernel belongs to the step in which it starts, which is the one that
launched it or, where vLLM schedules ahead, the one after. The profiler slows the host down: the
times of steps are those of a call before, without it. Times are in microseconds for each step.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["profile_window", "summary"]

_MARK = "step of the engine "
_ROWS = 25
"""Kernels, calls of the driver and functions that a table has."""


class Event(NamedTuple):
    """A range of a trace in microseconds, on the GPU or on the host."""

    start: float
    end: float
    name: str
    on_gpu: bool


class Step(NamedTuple):
    """One step: what was scheduled in it, and when it began and ended, in seconds."""

    requests: int
    tokens: int
    begin: float
    end: float

    @property
    def kind(self) -> str:
        """ "decodes", "mixed", or "nothing scheduled"."""
        if not self.tokens:
            return "nothing scheduled"
        return "decodes" if self.tokens == self.requests else "mixed"


@contextmanager
def _watched(llm: Any, around: Callable[[int, Callable[[], Any]], Any]) -> Iterator[list[Step]]:
    """The steps of an engine inside, as a list that grows.

    Args:
        llm: with its engine in this process.
        around: `around(number, step)` runs a step.
    """
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    own_step, own_schedule = engine.step, scheduler.schedule
    steps: list[Step] = []
    scheduled = [0, 0]

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = own_schedule(*args, **kwargs)
        scheduled[:] = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
        return output

    def step() -> Any:
        scheduled[:] = 0, 0
        begin = time.perf_counter()
        outputs = around(len(steps), own_step)
        steps.append(Step(*scheduled, begin, time.perf_counter()))
        return outputs

    engine.step, scheduler.schedule = step, schedule
    try:
        yield steps
    finally:
        engine.step, scheduler.schedule = own_step, own_schedule


def profile_window(
    llm: Any, generate: Callable[[], object], first: int, count: int
) -> dict[str, Any]:
    """Three calls of an engine: the first times its steps, the second has a trace of some of them,
    and the third the Python functions that these run.

    Args:
        llm: with its engine in this process.
        generate: makes a call with equal lengths and other prompts.
        first, count: the steps.
    """
    import torch

    with _watched(llm, lambda number, step: step()) as timed:
        generate()
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    functions = cProfile.Profile()

    def traced(number: int, step: Callable[[], Any]) -> Any:
        if number == first:
            profiler.start()
        if not first <= number < first + count:
            return step()
        with torch.profiler.record_function(f"{_MARK}{number}"):
            outputs = step()
        if number == first + count - 1:
            if on_gpu:
                torch.cuda.synchronize()
            profiler.stop()
        return outputs

    def counted(number: int, step: Callable[[], Any]) -> Any:
        return functions.runcall(step) if first <= number < first + count else step()

    with _watched(llm, traced) as steps:
        generate()
    if len(steps) < first + count:
        raise ValueError(f"the call has {len(steps)} steps; the window ends at {first + count}")
    events = [
        Event(event.time_range.start, event.time_range.end, event.name, _is_gpu(event))
        for event in profiler.events()
    ]
    with _watched(llm, counted):
        generate()
    return {
        "first": first, "count": count, **summary(steps[first:][:count], events),
        "untraced": _times(timed[first:], count), "functions": _functions(functions, count),
    }  # fmt: skip


def _is_gpu(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA")


def _times(steps: Sequence[Step], count: int) -> dict[str, Any]:
    """Steps of each kind without a profiler, and the time between steps."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for step in steps[:count]:
        kinds[step.kind].append((step.end - step.begin) * 1e6)
    found: dict[str, Any] = {
        kind: {
            "steps": len(times), "mean": round(statistics.mean(times)),
            "median": round(statistics.median(times)), "least": round(min(times)),
        }
        for kind, times in kinds.items()
    }  # fmt: skip
    between = [(b.begin - a.end) * 1e6 for a, b in pairwise(steps[: count + 1])]
    found["between steps"] = round(statistics.mean(between)) if between else 0
    return found


def summary(steps: Sequence[Step], events: Sequence[Event]) -> dict[str, Any]:
    """For each kind of steps: how many, and for each of them the time of the GPU, its share of the
    window's time, gaps between kernels, kernels, and calls of the driver.

    Args:
        steps: of the window.
        events: of its trace, with one range for each step.
    """
    marks = sorted(event for event in events if event.name.startswith(_MARK) and not event.on_gpu)
    begins, last = [mark.start for mark in marks], max(event.end for event in events)
    spans = [b - a for a, b in pairwise([*begins, last])]
    kinds: dict[str, Any] = {}
    for step, span in zip(steps, spans, strict=True):
        of = kinds.setdefault(step.kind, _Kind())
        of.steps += 1
        of.requests += step.requests
        of.tokens += step.tokens
        of.span += span
    end = 0.0
    for event in sorted(events):
        number = bisect_right(begins, event.start) - 1
        if number < 0 or event.name.startswith(_MARK):
            continue
        of = kinds[steps[number].kind]
        if event.on_gpu:
            if end:
                of.idle += max(0.0, event.start - end)
            of.busy += max(0.0, event.end - max(end, event.start))
            end = max(end, event.end)
            of.kernels[event.name[:100]].append(event.end - event.start)
        elif event.name.startswith("cu"):
            of.calls[event.name].append(event.end - event.start)
    return {"kinds": {kind: of.row() for kind, of in kinds.items()}}


class _Kind:
    """Sums over the steps of one kind."""

    def __init__(self) -> None:
        self.steps = self.requests = self.tokens = 0
        self.span = self.busy = self.idle = 0.0
        self.kernels: dict[str, list[float]] = defaultdict(list)
        self.calls: dict[str, list[float]] = defaultdict(list)

    def row(self) -> dict[str, Any]:
        """Means over the steps."""
        count = self.steps

        def table(times: dict[str, list[float]]) -> list[list[Any]]:
            rows = sorted(((sum(us), len(us), name) for name, us in times.items()), reverse=True)
            return [[name, round(n / count, 2), round(us / count, 1)] for us, n, name in rows]

        return {
            "steps": count, "requests": round(self.requests / count, 1),
            "tokens": round(self.tokens / count, 1), "traced_us": round(self.span / count),
            "gpu_us": round(self.busy / count), "gpu_idle_us": round(self.idle / count),
            "gpu_share": round(self.busy / self.span, 3) if self.span else None,
            "kernels": table(self.kernels)[:_ROWS], "calls": table(self.calls)[:_ROWS],
        }  # fmt: skip


def _functions(profile: cProfile.Profile, count: int) -> list[list[Any]]:
    """Python functions by their own time, which the profiler makes longer: name, calls and
    microseconds of a step."""
    stats: Any = pstats.Stats(profile)
    rows = sorted(
        ((own, calls, key) for key, (_, calls, own, _, _) in stats.stats.items()), reverse=True
    )
    return [
        [f"{'/'.join(file.split('/')[-2:])}:{line} {name}", round(calls / count, 1),
         round(own / count * 1e6, 1)]
        for own, calls, (file, line, name) in rows[:_ROWS]
    ]  # fmt: skip


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The tables of windows of equal steps, each column one run."""
    names = [row["backend"] for row in rows]
    yield f"{rows[0]['workload']}, steps {rows[0]['first']} and {rows[0]['count'] - 1} more"
    yield from _table(names, "", [row["untraced"] for row in rows], "us of a step, no profiler")
    for kind in sorted({kind for row in rows for kind in row["kinds"]}):
        found = [row["kinds"].get(kind, {}) for row in rows]
        facts = [{k: v for k, v in one.items() if k not in ("kernels", "calls")} for one in found]
        yield from _table(names, kind, facts, "traced")
        for part in ("kernels", "calls"):
            yield from _table(names, kind, [_by_name(one.get(part, [])) for one in found], part)
    yield from _table(names, "", [_by_name(row["functions"]) for row in rows], "functions")


def _by_name(table: Sequence[Sequence[Any]]) -> dict[str, str]:
    return {name: f"{count} x {us}" for name, count, us in table}


def _table(
    names: Sequence[str], kind: str, columns: Sequence[dict[str, Any]], title: str
) -> Iterator[str]:
    yield f"\n{kind} {title}".rstrip().ljust(104) + "".join(name.rjust(26) for name in names)
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, "") for column in columns]
        if isinstance(values[0] or values[-1], dict):
            for part in values[0] or values[-1]:
                shown = [str(v[part]) if v else "" for v in values]
                yield f"{name} {part}".ljust(104) + "".join(v.rjust(26) for v in shown)
        else:
            yield name.ljust(104) + "".join(str(value).rjust(26) for value in values)


def main(paths: Sequence[str]) -> None:
    """Print windows of several runs side by side."""
    runs = [list(map(json.loads, Path(path).read_text().splitlines())) for path in paths]
    for rows in zip(*runs, strict=True):
        print(*lines(rows), sep="\n", end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
