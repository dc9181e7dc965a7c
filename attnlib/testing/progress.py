"""A progress bar that redraws one line on a terminal and prints nothing elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

__all__ = ["ProgressBar"]

_WIDTH = 28


class ProgressBar:
    """A progress bar; writes to stderr by default, because reports use stdout.

    Args:
        total: number of steps.
        stream: output stream; None means stderr.
        enabled: draw the bar; None draws it only if the stream is a terminal.
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
        """Count one completed step."""
        self.done += 1
        self.failed += failed
        if self._enabled:
            self._stream.write(f"\r{self.line(label)}\x1b[K")
            self._stream.flush()

    def line(self, label: str) -> str:
        """The current text of the bar, at most 110 characters."""
        filled = _WIDTH * min(self.done, self.total) // max(self.total, 1)
        bar = "#" * filled + "-" * (_WIDTH - filled)
        failures = f", {self.failed} failed" if self.failed else ""
        return f"[{bar}] {self.done}/{self.total}{failures}  {label}"[:110]

    def close(self) -> None:
        """Clear the bar."""
        if self._enabled:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
