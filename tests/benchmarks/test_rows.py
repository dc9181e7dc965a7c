"""The rows that benchmark scripts share: choice, limits, failures and the result file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnlib.errors import ContractError
from benchmarks.gpu import rows


def _measure(name: str) -> dict[str, Any]:
    if name == "fails":
        raise ValueError("wrong output")
    return {"us": float(len(name))}


def _run(tmp_path: Path, *arguments: str, processes: int = 1) -> tuple[int, dict[str, Any]]:
    """Exit status and row -> result."""
    out = tmp_path / "new" / "out.json"
    options = rows.parser("a test").parse_args([*arguments, "--out", str(out), "--commit", "abc"])
    status = rows.run(options, ["decode 1", "decode 2", "fails", "prefill"], _measure, processes)
    document = json.loads(out.read_text())
    assert document["provenance"]["commit"] == "abc"
    return status, {row.pop("row"): row for row in document["rows"]}


def test_rows_are_chosen_in_the_order_of_the_patterns(tmp_path: Path) -> None:
    assert _run(tmp_path, "prefill", "decode*", "*1") == (
        0, {"prefill": {"us": 7.0}, "decode 1": {"us": 8.0}, "decode 2": {"us": 8.0}},
    )  # fmt: skip
    with pytest.raises(ContractError, match="no row matches 'latent'.*4 names"):
        _run(tmp_path, "latent")


def test_a_failed_row_does_not_affect_the_next(tmp_path: Path) -> None:
    status, found = _run(tmp_path)
    assert status == 1 and found["fails"] == {"error": "ValueError: wrong output"}
    assert found["prefill"] == {"us": 7.0}


def test_rows_without_time_are_listed(tmp_path: Path) -> None:
    status, found = _run(tmp_path, "decode*", "--limit-seconds", "-1")
    assert status == 1
    assert found == dict.fromkeys(["decode 1", "decode 2"], {"error": "not run: no time"})


@pytest.mark.slow
def test_several_processes_give_the_same_results(tmp_path: Path) -> None:
    assert _run(tmp_path, processes=2) == _run(tmp_path)
