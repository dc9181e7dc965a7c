"""Calls of functions, which tests of cost count: their number does not depend on the machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["counted_calls"]


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Within the block, the calls of this thread by name: `file.function` of functions in Python,
    `module.function` of those in C."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            code = frame.f_code
            calls[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1
        elif event == "c_call":
            calls[f"{function.__module__}.{function.__name__}"] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)
