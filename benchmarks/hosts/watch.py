"""What a benchmark of an engine prints while it runs, so that one that is stopped shows where it
was.

A line that starts with MARK names each part that begins, and repeats every INTERVAL seconds with
what the part has done. The stacks of all threads follow where a part takes longer than STALLED
seconds, and when the process gets SIGNAL (`timeout -s USR1 -k 3 SECONDS COMMAND` sends it, and ends
the process three seconds later).
"""

from __future__ import annotations

import faulthandler
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["SIGNAL", "Watch", "where"]

MARK = "-- "
INTERVAL = 15.0
STALLED = 60.0
SIGNAL = signal.SIGUSR1
_FRAMES = 6
"""Functions of a stack that `where` names."""


class _Part(NamedTuple):
    name: str
    begin: float
    state: Callable[[], str]


class Watch:
    """The parts of one process, from now on.

    Args:
        interval: seconds between two lines of a part.
        stalled: seconds of a part after which the stacks of all threads are printed.
    """

    def __init__(self, interval: float = INTERVAL, stalled: float = STALLED) -> None:
        self._interval, self._stalled = interval, stalled
        self._parts: tuple[_Part, ...] = ()
        faulthandler.register(SIGNAL, sys.__stderr__)
        threading.Thread(target=self._repeat, daemon=True).start()

    @contextmanager
    def part(self, name: str, state: Callable[[], str] = str) -> Iterator[None]:
        """A part of what the process does; parts may be nested.

        Args:
            name: of the part.
            state: what it has done; called in another thread, and cheap.
        """
        before = self._parts
        self._set((*before, _Part(name, time.monotonic(), state)))
        self._print(self._parts)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, parts: tuple[_Part, ...]) -> None:
        self._parts = parts
        faulthandler.cancel_dump_traceback_later()
        if parts:
            faulthandler.dump_traceback_later(self._stalled, repeat=True, file=sys.__stderr__)

    def _repeat(self) -> None:
        printed = time.monotonic()
        while True:
            time.sleep(self._interval / 10)
            parts, now = self._parts, time.monotonic()
            if parts and now - max(printed, parts[-1].begin) >= self._interval:
                self._print(parts)
                printed = now

    def _print(self, parts: Sequence[_Part]) -> None:
        last = parts[-1]
        seconds, state = time.monotonic() - last.begin, last.state()
        shown = f", {seconds:.0f} s" if seconds >= self._interval else ""
        print(MARK + ": ".join(part.name for part in parts) + shown, state, flush=True)


def where(lines: Sequence[str]) -> str:
    """What a process was doing, from its output: the last part, and the innermost functions of the
    main thread's last stack. Empty for a process without a `Watch`."""
    parts = [line for line in lines if line.startswith(MARK)]
    if not parts:
        return ""
    threads = [number for number, line in enumerate(lines) if "(most recent call first):" in line]
    found = []
    for line in lines[threads[-1] + 1 :] if threads else ():  # the main thread is the last one
        frame = re.fullmatch(r' +File "(.*)", line (\d+) in (.*)', line)
        if frame is None or len(found) == _FRAMES:
            break
        found.append(f"{'/'.join(frame[1].split('/')[-2:])}:{frame[2]} {frame[3]}")
    texts = [parts[-1].removeprefix(MARK).strip(), " < ".join(found)]
    return " | in ".join(text for text in texts if text)
