"""Microseconds per call: by replays of a CUDA graph of many calls, or by eager calls.

A timer is prepared once (compiled, captured) and then runs rounds. The rounds of all backends
alternate, so that clock and temperature changes affect all of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from attnlib.backends._foreign.outputs import same_batch_at_replay

__all__ = [
    "EagerTimer",
    "GraphTimer",
    "Measurement",
    "host_us",
    "measure_in_turn",
    "synchronize",
    "warm_up",
]

Call = Callable[[int], object]
"""One call on the copy of the cache with the given index."""

ROUNDS = 7
_ROUND_US = 3000.0
_REPLAY_US = 10_000.0
_STEADY_CALL_US = 1000.0
_STEADY_REPLAY_US = 100_000.0
"""Rounds of calls from `_STEADY_CALL_US` on. Such calls can reach the power limit of the chip, and
its clock then falls within tens of milliseconds: shorter rounds measure this transition."""
_MAX_CALLS = 480
_LONG_US = 200_000.0


@dataclass(frozen=True)
class Measurement:
    """The result of a timer over its rounds.

    Attributes:
        us: median over the rounds of the time of one call, in microseconds.
        low: the least of the rounds.
        high: the greatest of the rounds.
        host_us: median time until an eager call returns; None for a graph.
        calls: calls per round.
        rounds: number of rounds.
    """

    us: float
    low: float
    high: float
    host_us: float | None
    calls: int
    rounds: int


def synchronize(device: torch.device) -> None:
    """Wait for the work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class EagerTimer:
    """Eager calls back to back; the time of a call is the longer of host and device time.

    Args:
        call: the call to time.
        copies: the number of copies of the cache, used in turn.
        device: where the call runs.
        expected_us: about how long one call takes, to choose the calls per round.
    """

    def __init__(self, call: Call, copies: int, device: torch.device, expected_us: float) -> None:
        self._call, self._copies, self._device = call, copies, device
        self.calls = max(
            min(int(_ROUND_US / max(expected_us, 1.0)), 100), 1 if expected_us > _LONG_US else 3
        )

    def round(self) -> tuple[float, float | None]:
        """(microseconds per call, microseconds until a call returns)."""
        synchronize(self._device)
        start = time.perf_counter()
        for number in range(self.calls):
            self._call(number % self._copies)
        returned = time.perf_counter()
        synchronize(self._device)
        elapsed = time.perf_counter() - start
        return elapsed / self.calls * 1e6, (returned - start) / self.calls * 1e6


class GraphTimer:
    """A CUDA graph of many calls, replayed between two events. Arguments as in `EagerTimer`.

    Raises:
        RuntimeError: capture failed.
    """

    def __init__(self, call: Call, copies: int, device: torch.device, expected_us: float) -> None:
        wanted = max(min(int(_ROUND_US / max(expected_us, 1.0)), _MAX_CALLS), 1)
        captured = max(-(-wanted // copies), 1) * copies  # uses every copy equally often
        self._device = device
        self._call = call  # owns the tensors that the graph reads
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for number in range(copies):
                call(number)  # work for addresses that are new to a launch must precede the capture
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        before, collects = torch.cuda.current_stream(device), gc.isenabled()
        gc.disable()  # freeing memory during the capture would break it
        try:
            with (
                same_batch_at_replay(),
                torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
            ):
                # The last call is that of copy 0: its output is checked after a replay, and lists
                # of selected keys differ between the copies.
                for number in reversed(range(captured)):
                    call(number % copies)
        except Exception:
            torch.cuda.set_stream(before)  # a failed capture does not restore the current stream
            raise
        finally:
            if collects:
                gc.enable()
        self.replay()
        self._replays = 1
        replay_us = max(self._replayed_us(), 1.0)
        steady = replay_us / captured >= _STEADY_CALL_US
        round_us = _STEADY_REPLAY_US if steady else _REPLAY_US
        self._replays = max(min(int(round_us / replay_us), 200), 1)
        self.calls = captured * self._replays

    def round(self) -> tuple[float, float | None]:
        """(microseconds per call, None).

        One replay precedes the timed ones to raise clocks and fill the caches.
        """
        return self._replayed_us() / self.calls, None

    def replay(self) -> None:
        """Run one replay and synchronize."""
        self._graph.replay()
        torch.cuda.synchronize(self._device)

    def _replayed_us(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # untyped in torch
        self._graph.replay()
        start.record()
        for _ in range(self._replays):
            self._graph.replay()
        end.record()
        torch.cuda.synchronize(self._device)
        return float(start.elapsed_time(end)) * 1e3


Timer = EagerTimer | GraphTimer


def warm_up(call: Call, device: torch.device) -> float:
    """Call a few times.

    Returns:
        About how many microseconds one call takes after compilation.
    """
    call(0)
    synchronize(device)
    start = time.perf_counter()
    call(0)
    synchronize(device)
    once = (time.perf_counter() - start) * 1e6
    if once > _LONG_US:
        return once
    number = 5
    start = time.perf_counter()
    for _ in range(number):
        call(0)
    synchronize(device)
    return min((time.perf_counter() - start) * 1e6 / number, once)


def measure_in_turn(
    timers: Mapping[str, Timer], expected_us: Mapping[str, float]
) -> dict[str, Measurement]:
    """Run seven rounds of every timer in turn (three if a call takes more than 200 ms).

    The order of the timers is reversed in every other round, so that each one follows both its
    predecessor and its successor: the clock at the start of a round depends on the round before.

    Returns:
        The medians of the rounds.
    """
    rounds = {name: 3 if expected_us[name] > _LONG_US else ROUNDS for name in timers}
    found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in timers}
    for number in range(ROUNDS):
        order = list(timers.items())
        for name, timer in order[:: -1 if number % 2 else 1]:
            if number < rounds[name]:
                found[name].append(timer.round())
    return {name: _measurement(timers[name], times) for name, times in found.items()}


def _measurement(timer: Timer, times: list[tuple[float, float | None]]) -> Measurement:
    us = [time_us for time_us, _ in times]
    host = [host for _, host in times if host is not None]
    return Measurement(
        statistics.median(us),
        min(us),
        max(us),
        statistics.median(host) if host else None,
        timer.calls,
        len(times),
    )


def host_us(call: Callable[[], object], device: torch.device, number: int = 20) -> float:
    """Median microseconds until `call` returns.

    The device is idle at the start of each round of `number` calls.
    """
    call()
    found = []
    for _ in range(ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(number):
            call()
        found.append((time.perf_counter() - start) / number * 1e6)
    synchronize(device)
    return statistics.median(found)
