"""Where the start of an engine spends its time, by samples of the main thread's stack."""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

_INTERVAL = 0.004
"""Seconds. A thread that holds Python's lock for longer is sampled afterwards, with that time."""
_SHOWN = ("attnlib", "worker", "loader", "core.py", "llm.py", "graph", "import", "triton")
"""What the path of a function has in it that is written."""


class StartParts:
    """Samples from now on until `write`; the caller's thread is the one that starts the engine."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._innermost: Counter[str] = Counter()
        self._thread, self._ends = threading.get_ident(), threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def _sample(self) -> None:
        last = time.perf_counter()
        while not self._ends.wait(_INTERVAL):
            names = _names(sys._current_frames().get(self._thread))
            now = time.perf_counter()
            seconds, last = now - last, now
            for name in dict.fromkeys(names):
                self._seconds[name] += seconds
            ours = [name for name in names if name.startswith("attnlib/")]
            if names:
                self._innermost[names[0]] += seconds
            if ours:
                self._seconds["attnlib, all of it"] += seconds
                self._innermost[f"first of attnlib: {ours[-1]}"] += seconds

    def write(self, path: Path) -> None:
        """End, and write the seconds of functions: with what they call, and alone."""
        self._ends.set()
        self._sampler.join()
        shown = {k: v for k, v in self._seconds.items() if any(part in k for part in _SHOWN)}
        tables = {"with callees": Counter(shown), "alone": self._innermost}
        text = {
            title: {name: round(seconds, 2) for name, seconds in table.most_common(70)}
            for title, table in tables.items()
        }
        path.write_text(json.dumps(text, indent=1) + "\n")


def _names(frame: Any) -> list[str]:
    """The functions of a stack, the innermost first."""
    found = []
    while frame is not None:
        found.append(_name(frame.f_code))
        frame = frame.f_back
    return found


@functools.cache
def _name(code: Any) -> str:
    file = "/".join(Path(code.co_filename).parts[-4:])
    return f"{file[max(0, file.find('attnlib/')) :]} {code.co_name}"
