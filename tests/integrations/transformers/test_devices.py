"""What only a CPU serves asks `devices.kind_of`, which tests of the ways of a GPU replace."""

from __future__ import annotations

import re
from pathlib import Path

from attnlib.integrations.transformers import devices

ELSEWHERE = {
    "attention.py": "a layer of a GPU does without a call; what is called asks",
    "continuous_batch.py": "where the starts of requests are",
    "dense.py": "the order of operations, with equal results",
    "paged_batches.py": "positions that a caller has on the host",
    "static_rows.py": "rows of a cache that are copied, with equal results",
}
"""Modules that ask a tensor, and why a test of a GPU's ways does not care."""


def test_modules_ask_for_the_kind_of_a_device() -> None:
    asks = re.compile(r"""\.is_cpu\b|device\.type\s*[!=]=\s*["']cpu["']""")
    found = {
        path.name
        for path in Path(devices.__file__).parent.glob("*.py")
        if asks.search(path.read_text())
    }
    assert found == set(ELSEWHERE)
