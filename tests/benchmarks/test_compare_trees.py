"""Several trees in one process: times and ratios, and an error where outputs differ."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_WRONG = """
_forward = TorchImpl.forward


def _wrong(self, query, cache, metadata, output, lse=None):
    _forward(self, query, cache, metadata, output, lse)
    output += 1


TorchImpl.forward = _wrong
"""


def _compare(out: Path, *trees: Path) -> tuple[int, dict[str, Any]]:
    """Exit status and the row of a decode by the torch backend."""
    ran = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.gpu.compare_trees", *map(str, trees),
            "--cases", "cpu-decode-1x512", "--backend", "torch", "--device", "cpu",
            "--rounds", "2", "--out", str(out),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert out.exists(), ran.stderr
    (row,) = json.loads(out.read_text())["rows"]
    return ran.returncode, row


def test_each_tree_has_a_time(tmp_path: Path) -> None:
    status, row = _compare(tmp_path / "out.json", ROOT, ROOT)
    first, second = f"0 {ROOT}", f"1 {ROOT}"
    assert status == 0 and row["us"].keys() == row["ratio"].keys() == {first, second}
    assert row["ratio"][first] == 1.0 and min(row["us"].values()) > 0


def test_trees_with_other_outputs_are_not_timed(tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(
        ROOT / "attnlib", changed / "attnlib", ignore=shutil.ignore_patterns("__pycache__")
    )
    source = changed / "attnlib" / "backends" / "torch" / "impl.py"
    source.write_text(f"{source.read_text()}\n\n{_WRONG}")
    status, row = _compare(tmp_path / "out.json", ROOT, changed)
    assert status == 1 and "the output of 1" in row["error"]
