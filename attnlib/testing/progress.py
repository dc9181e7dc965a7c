"""A progress bar for people: on a terminal it redraws one line, anywhere else it stays silent."""

from __future__ import annotations

import sys
from typing import TextIO

__all__ = ["ProgressBar"]

_WIDTH = 28


class ProgressBar:
    """Counts up to `total`; made for stderr, so that stdout stays clean for reports.

    Args:
        total: how many steps there will be.
        stream: where to draw; None means stderr.
        enabled: None means only when the stream is a terminal.
    """

    def __init__(
        self, total: int, stream: TextIO | None = None, enabled: bool | None = None
    ) -> None:
        self.total = total
        self.done = 0
        self.failed = 0
        self._stream = stream or sys.stderr
        self._enabled = self._stream.isatty() if enabled is None else enabled

    def advance(self, label: str, failed: bool = False) -> None:
        """One step done."""
        self.done += 1
        self.failed += failed
        if self._enabled:
            self._stream.write(f"\r{self.line(label)}\x1b[K")
            self._stream.flush()

    def line(self, label: str) -> str:
        """What the bar shows now."""
        filled = _WIDTH * min(self.done, self.total) // max(self.total, 1)
        bar = "#" * filled + "-" * (_WIDTH - filled)
        failures = f", {self.failed} failed" if self.failed else ""
        return f"[{bar}] {self.done}/{self.total}{failures}  {label}"[:110]

    def close(self) -> None:
        """Clear the line."""
        if self._enabled:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
