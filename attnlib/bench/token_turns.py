"""Runs of `generate` that take turns token by token.

The speed of a host changes from one second to the next, while other work runs on it. Neighbors in
time are comparable: each implementation has a thread with a `generate` of its own, and passes the
turn on before each forward. A GPU is idle then. A decode changes settings of the whole model
(`_optimize_model_for_decode`), so all prompts come before it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["TokenTurns"]


class TokenTurns:
    """`generate` of several implementations over one model.

    Args:
        model: the model; its `prepare_inputs_for_generation` passes the turn on until `close`.
        runs: a run of each implementation; it returns tokens.
        clock: what tells the seconds of a turn.

    Attributes:
        seconds: of each implementation, for each round the seconds between two turns.
        tokens: of each implementation, those of the last round.
    """

    def __init__(
        self,
        model: Any,
        runs: dict[str, Callable[[], torch.Tensor]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._runs, self._clock = model, runs, clock
        # A thread for all rounds: caches of threads outlive a run.
        self._threads = {name: ThreadPoolExecutor(1) for name in runs}
        self._turns = {name: threading.Semaphore(0) for name in runs}
        self._order: list[str] = []
        self._local = threading.local()
        self.seconds: dict[str, list[list[float]]] = {name: [] for name in runs}
        self.tokens: dict[str, torch.Tensor] = {}
        self._prepare = model.prepare_inputs_for_generation
        self._optimize = getattr(model, "_optimize_model_for_decode", None)
        self._decoding: list[Any] = []
        model.prepare_inputs_for_generation = self._prepared
        if self._optimize is not None:
            model._optimize_model_for_decode = self._optimized

    def round(self) -> None:
        """One run of each implementation; the order changes from round to round."""
        self._order = list(self._runs)[:: -1 if len(next(iter(self.seconds.values()))) % 2 else 1]
        found = [self._threads[name].submit(self._play, name) for name in self._order]
        self._turns[self._order[0]].release()
        for future in found:
            future.result()

    def close(self) -> None:
        """Give the model its method back."""
        del self._model.prepare_inputs_for_generation
        if self._optimize is not None:
            del self._model._optimize_model_for_decode
        for thread in self._threads.values():
            thread.shutdown()

    def total(self, name: str, first: int = 0) -> float:
        """Seconds of a run: the sum of the medians over the rounds of each turn.

        Args:
            name: the implementation.
            first: turns that are left out. The first three are those before the first decode.
        """
        turns = list(zip(*self.seconds[name], strict=True))
        return float(sum(map(statistics.median, turns[first:])))

    def _play(self, name: str) -> None:
        self._local.name = name
        self.seconds[name].append([])
        try:
            self._begin()
            self.tokens[name] = self._runs[name]()
            self._end()
        finally:
            following = self._following(name)
            self._order.remove(name)
            if following != name:
                self._turns[following].release()

    def _prepared(self, *args: Any, **kwargs: Any) -> Any:
        self._pass_on()
        return self._prepare(*args, **kwargs)

    @contextmanager
    def _optimized(self) -> Iterator[None]:
        """The first one enters the context of the model, the last one leaves it."""
        self._pass_on()
        if not self._decoding:
            assert self._optimize is not None
            self._context = self._optimize()
            self._context.__enter__()
        self._decoding.append(self._local.name)
        try:
            yield
        finally:
            self._decoding.remove(self._local.name)
            if not self._decoding:
                self._context.__exit__(None, None, None)

    def _pass_on(self) -> None:
        name = getattr(self._local, "name", None)
        if name is not None:
            self._end()
            self._turns[self._following(name)].release()
            self._begin()

    def _following(self, name: str) -> str:
        order = self._order
        return order[(order.index(name) + 1) % len(order)]

    def _begin(self) -> None:
        self._turns[self._local.name].acquire()
        self._model.set_attn_implementation(self._local.name)
        self._local.started = self._clock()

    def _end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[self._local.name][-1].append(self._clock() - self._local.started)
