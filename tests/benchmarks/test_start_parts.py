"""`benchmarks/hosts/start_parts.py`."""

from __future__ import annotations

import json
import time
from pathlib import Path

from benchmarks.hosts.start_parts import StartParts


def worker_that_waits(parts: StartParts) -> None:
    """Until it is sampled."""
    while not any("worker_that_waits" in name for name in parts._seconds):
        time.sleep(0.01)


def test_a_function_is_in_the_table_with_its_callees_and_alone(tmp_path: Path) -> None:
    parts = StartParts()
    worker_that_waits(parts)
    parts.write(tmp_path / "parts.json")
    tables = json.loads((tmp_path / "parts.json").read_text())
    for table in tables.values():
        (name,) = (name for name in table if name.endswith(" worker_that_waits"))
        assert "test_start_parts.py" in name
    assert not any("_sample" in name for name in tables["alone"])
