"""Microseconds per call: by replaying a CUDA graph of many calls, or call by call as eager code pays them.

A stopwatch is wound up once (compiled, captured) and then asked for rounds, so that backends can take turns and none of
them has the cool chip to itself.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from attnlib.backends._foreign.outputs import same_batch_at_replay

__all__ = ["EagerWatch", "GraphWatch", "Reading", "host_us", "take_turns", "wind_up"]

Call = Callable[[int], object]
"""One call on the copy of the cache with this number."""

ROUNDS = 7
_ROUND_US = 3000.0
_REPLAY_US = 10_000.0
_MOST_CALLS = 480
_LONG_US = 200_000.0


@dataclass(frozen=True)
class Reading:
    """What a stopwatch found over its rounds.

    Attributes:
        us: median time of one call; low, high: of the rounds.
        host_us: median time until an eager call returns; None for a graph.
        calls: in one round; rounds: how many.
    """

    us: float
    low: float
    high: float
    host_us: float | None
    calls: int
    rounds: int


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class EagerWatch:
    """Calls one after the other from the host; the time of a call is the longer of host and device.

    Args:
        call: what is timed; copies: how many copies of the cache it may be given in turn.
        expected_us: of one call, to choose how many make a round.
    """

    def __init__(self, call: Call, copies: int, device: torch.device, expected_us: float) -> None:
        self._call, self._copies, self._device = call, copies, device
        self.calls = max(
            min(int(_ROUND_US / max(expected_us, 1.0)), 100), 1 if expected_us > _LONG_US else 3
        )

    def round(self) -> tuple[float, float | None]:
        """(microseconds per call, microseconds until a call returns)."""
        _synchronize(self._device)
        start = time.perf_counter()
        for number in range(self.calls):
            self._call(number % self._copies)
        returned = time.perf_counter()
        _synchronize(self._device)
        return (time.perf_counter() - start) / self.calls * 1e6, (
            returned - start
        ) / self.calls * 1e6


class GraphWatch:
    """A CUDA graph of many calls, replayed between two events.

    Raises:
        RuntimeError: whatever capturing the calls raises.
    """

    def __init__(self, call: Call, copies: int, device: torch.device, expected_us: float) -> None:
        wanted = max(min(int(_ROUND_US / max(expected_us, 1.0)), _MOST_CALLS), 1)
        captured = max(-(-wanted // copies), 1) * copies  # every copy as often as every other
        self._device = device
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for number in range(copies):
                call(
                    number
                )  # whatever a launch prepares for an address it has not seen happens here
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        before, collects = torch.cuda.current_stream(device), gc.isenabled()
        gc.disable()  # nothing is to be freed while the capture lasts
        try:
            with (
                same_batch_at_replay(),
                torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
            ):
                for number in range(captured):
                    call(number % copies)
        except Exception:
            torch.cuda.set_stream(
                before
            )  # a capture that fails leaves its own stream behind as the current one
            raise
        finally:
            if collects:
                gc.enable()
        self.replay()
        self._replays = 1
        self._replays = max(min(int(_REPLAY_US / max(self._replayed_us(), 1.0)), 200), 1)
        self.calls = captured * self._replays

    def round(self) -> tuple[float, float | None]:
        """(microseconds per call, None); one replay first, so that clocks are up and the caches hold what a call leaves there."""
        return self._replayed_us() / self.calls, None

    def replay(self) -> None:
        """One replay, to its end."""
        self._graph.replay()
        torch.cuda.synchronize(self._device)

    def _replayed_us(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._graph.replay()
        start.record()
        for _ in range(self._replays):
            self._graph.replay()
        end.record()
        torch.cuda.synchronize(self._device)
        return float(start.elapsed_time(end)) * 1e3


Watch = EagerWatch | GraphWatch


def wind_up(call: Call, device: torch.device) -> float:
    """Call a few times; returns about how many microseconds a call takes once everything is compiled."""
    call(0)
    _synchronize(device)
    start = time.perf_counter()
    call(0)
    _synchronize(device)
    once = (time.perf_counter() - start) * 1e6
    if once > _LONG_US:
        return once
    number = 5
    start = time.perf_counter()
    for _ in range(number):
        call(0)
    _synchronize(device)
    return min((time.perf_counter() - start) * 1e6 / number, once)


def take_turns(
    watches: Mapping[str, Watch], expected_us: Mapping[str, float]
) -> dict[str, Reading]:
    """Seven rounds of every stopwatch in turn (three where a call takes more than 200 ms), and the median of each."""
    rounds = {name: 3 if expected_us[name] > _LONG_US else ROUNDS for name in watches}
    found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in watches}
    for number in range(ROUNDS):
        for name, watch in watches.items():
            if number < rounds[name]:
                found[name].append(watch.round())
    return {name: _reading(watches[name], times) for name, times in found.items()}


def _reading(watch: Watch, times: list[tuple[float, float | None]]) -> Reading:
    us = [time_us for time_us, _ in times]
    host = [host for _, host in times if host is not None]
    return Reading(
        statistics.median(us),
        min(us),
        max(us),
        statistics.median(host) if host else None,
        watch.calls,
        len(times),
    )


def host_us(call: Callable[[], object], device: torch.device, number: int = 20) -> float:
    """Median microseconds until `call` returns, the device being idle at the start of each round of `number` calls."""
    call()
    found = []
    for _ in range(ROUNDS):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(number):
            call()
        found.append((time.perf_counter() - start) / number * 1e6)
    _synchronize(device)
    return statistics.median(found)
