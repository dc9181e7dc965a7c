"""The shipped tables: which rows of results are ranked, and which results are errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from attnlib.bench.results import Document, Row, Run, case_of_row, read_document, write_document
from attnlib.errors import ContractError
from attnlib.tuning import layer_class
from benchmarks import ship_rankings

SOURCE = "h200/float8_decodes.json"
CASES = ("e4m3-decode-8x8k", "e4m3-decode-32x4k")


def _write(folder: Path, name: str, times: Mapping[str, float | None], runs: int = 1) -> str:
    """A result with these times in microseconds of each case; None for a failed row."""
    measured = read_document(ship_rankings.RESULTS / SOURCE)
    rows = []
    for like in (next(row for row in measured.rows if row.case == case) for case in CASES):
        for backend, us in times.items():
            values = {**vars(like), "backend": backend, "us": us}
            values |= {"status": "ok" if us else "failed", "reason": "" if us else "no memory"}
            rows.append(Row(**values))
    write_document(Document(measured.runs * runs, tuple(rows)), folder / name)
    return name


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ship_rankings, "RESULTS", tmp_path)
    monkeypatch.setattr(ship_rankings, "TABLES", tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _results(folder: Path) -> None:
    source = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / SOURCE
    (folder / "h200").mkdir()
    (folder / SOURCE).write_bytes(source.read_bytes())


def test_only_backends_that_auto_knows_are_ranked(folder: Path) -> None:
    """Neither labels with settings nor paths: auto selects neither."""
    times = {"benchmarks/gpu/variants.py:Portable": 1.0, "flashinfer[prefill_backend=fa2]": 2.0}
    source = _write(folder, "rows.json", {**times, "triton": 4.0, "flashinfer": 3.0})
    (line,) = ship_rankings.table_of([source])["backends"]
    assert line["ranking"] == ["flashinfer", "triton"] and line["left_out"] == {}
    like = read_document(folder / source).rows[0]
    assert line["layer"] == layer_class(case_of_row(like).spec)


def test_a_class_is_ranked_by_the_result_with_most_backends(folder: Path) -> None:
    """Results that compare nothing rank nothing, and the table does not name them."""
    alone = _write(folder, "alone.json", {"triton": 1.0, "flashinfer": None})
    two = _write(folder, "two.json", {"triton": 2.0, "flashinfer": 3.0})
    again = _write(folder, "again.json", {"triton": 3.0, "flashinfer": 2.0})
    three = _write(folder, "three.json", {"triton": 3.0, "flashinfer": 2.0, "flash_attn": 1.0})
    assert ship_rankings.table_of([alone])["backends"] == []
    (line,) = ship_rankings.table_of([alone, two, again])["backends"]
    assert line["provenance"] == "two" and line["ranking"] == ["triton", "flashinfer"]
    table = ship_rankings.table_of([alone, two, again, three])
    assert [line["provenance"] for line in table["backends"]] == ["three"]
    assert list(table["provenance"]) == ["three"]


def test_results_that_cannot_be_used_are_errors(folder: Path) -> None:
    """The message names the file; no table is written."""
    two = _write(folder, "two.json", {"triton": 1.0, "flashinfer": 2.0}, runs=2)
    with pytest.raises(SystemExit, match=r"two\.json has 2 runs"):
        ship_rankings.table_of([two])
    with pytest.raises(SystemExit, match="another source is named float8_decodes"):
        ship_rankings.table_of([SOURCE, SOURCE])
    with pytest.raises(ContractError, match=r"missing\.json cannot be read"):
        ship_rankings.table_of(["missing.json"])
    document = read_document(folder / SOURCE)
    (run,) = document.runs
    other = Run({**run.provenance, "gpu": "NVIDIA H100 80GB HBM3"}, run.peaks)
    write_document(Document((other,), document.rows), folder / "other.json")
    with pytest.raises(SystemExit, match=r"other\.json was measured on NVIDIA H100"):
        ship_rankings.table_of([SOURCE, "other.json"])


def test_tables_are_written_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ship_rankings, "TILES", {})
    monkeypatch.setattr(ship_rankings, "SOURCES", {"a": (SOURCE,), "b": ("missing.json",)})
    with pytest.raises(ContractError):
        ship_rankings.main()
    assert not (folder / "a.json").exists()
    monkeypatch.setattr(ship_rankings, "SOURCES", {"a": (SOURCE,)})
    ship_rankings.main()
    assert (folder / "a.json").exists()
