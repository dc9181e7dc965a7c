"""Documents: written and read again, merged, and compared within one run only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnlib.bench.results import (
    Document,
    Row,
    Run,
    best_other,
    merge,
    ratio,
    read_document,
    write_document,
)
from attnlib.bench.table import case_lines, heading, summary_line
from attnlib.errors import ContractError
from tests.generated_pages import generator

PEAKS = {"copy_gbps": 100.0, "read_gbps": 90.0, "matmul_tflops": 5.0, "matmul": "a product"}


def run_of(name: str = "a chip") -> Run:
    return Run(
        {
            "gpu": name,
            "torch": "2",
            "triton": "3",
            "driver": "4",
            "commit": "abc",
            "date": "today",
            "command": "attnlib bench",
        },
        PEAKS,
    )


def row_of(backend: str, us: float | None = None, case: str = "decode-1x8k", **fields: Any) -> Row:
    base = {
        "case": case,
        "kind": case.split("-")[0],
        "batch": "q1s8192",
        "shape": "32/8 heads",
        "status": "ok" if us else "unsupported",
        "how": "graph",
        "gbps": 1e5 / us if us else None,
        "tflops": 1e5 / us if us else None,
        "share": 0.5,
        "checked": True,
        "settings": {"block_size": 16, "head_size": 128},
    }
    return Row(backend=backend, us=us, **{**base, **fields})


def test_documents_are_read_as_written(tmp_path: Path) -> None:
    rows = (
        row_of("triton", 9.0, note="no graph", first_call_s=1.5),
        row_of("torch", reason="no"),
        row_of("flash_attn", 10.0),
    )
    document = Document((run_of(),), rows)
    write_document(document, tmp_path / "new" / "bench.json")
    assert read_document(tmp_path / "new" / "bench.json") == document
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["bench.json"], (
        "no part of a file is left"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(version=1), "not an attnlib-bench document of version 2"),
        (lambda data: data.update(schema="other"), "not an attnlib-bench document"),
        (
            lambda data: data["rows"][0].pop("us"),
            r"row 0 is not a Row of this version: missing \['us'\]",
        ),
        (lambda data: data["rows"][0].update(fast=True), r"unknown \['fast'\]"),
        (lambda data: data["rows"][0].update(status="splendid"), "status 'splendid'"),
        (lambda data: data["rows"][0].update(run=1), "run 1"),
    ],
)
def test_documents_of_another_form_are_errors(tmp_path: Path, change: Any, message: str) -> None:
    data = json.loads(Document((run_of(),), (row_of("triton", 9.0),)).to_json())
    change(data)
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(ContractError, match=message):
        read_document(tmp_path / "x.json")


def test_a_file_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="cannot be read as a result of attnlib bench --json"):
        read_document(tmp_path / "none.json")


def test_the_ratio_is_to_the_best_correct_backend_of_the_same_run() -> None:
    ours = row_of("triton", 9.0)
    rows = [
        ours,
        row_of("torch", 1.0),  # the reference is not compared
        row_of("flash_attn", 10.0),
        row_of("flashinfer", 12.0),
        row_of("x", 2.0, status="wrong"),
        row_of("y", 3.0, run=1),
        row_of("z", 4.0, how="eager"),
        row_of("w", 5.0, case="decode-other"),
    ]
    other = best_other(rows, ours)
    assert other is not None and other.backend == "flash_attn"
    assert ratio(rows, ours) == pytest.approx(0.9) and ratio(rows, rows[2]) is None
    variant = row_of("triton[gluon=0]", 8.0)
    assert best_other([*rows, variant], ours) == other and ratio(
        [*rows, variant], variant
    ) == pytest.approx(0.8)
    assert ratio([ours], ours) is None and ratio(rows, row_of("triton")) is None


def test_the_table_compares_every_backend() -> None:
    """Also without triton: authors of kernels compare theirs with torch on a CPU."""
    rows = [row_of("torch", 2.0), row_of("mine", 5.0), row_of("w", 9.0, case="decode-other")]
    first, second, third = (case_lines([row]) for row in rows)
    assert all("0.400" not in text and "2.500" not in text for text in (first, second, third))
    assert [line.split()[-1] for line in case_lines(rows).splitlines()[1:3]] == ["0.400", "2.500"]
    primary = row_of("triton", 9.0)
    assert "0.900" in case_lines([primary, rows[0], row_of("flash_attn", 10.0)])


def test_merging_keeps_runs_apart_and_takes_the_last_of_each_case() -> None:
    first = Document(
        (run_of("one"),),
        (
            row_of("triton", 9.0),
            row_of("flash_attn", 10.0),
            row_of("triton", status="not run", case="prefill-a"),
        ),
    )
    second = Document(
        (run_of("two"),),
        (row_of("triton", 5.0, case="prefill-a"), row_of("triton", status="not run")),
    )
    third = Document((run_of("three"),), (row_of("triton", 8.0),))
    merged = merge([first, second])
    assert [(row.case, row.us, row.run) for row in merged.rows] == [
        ("decode-1x8k", 9.0, 0),
        ("decode-1x8k", 10.0, 0),
        ("prefill-a", 5.0, 1),
    ]
    assert [run.provenance["gpu"] for run in merged.runs] == ["one", "two"]
    assert [(row.us, row.run) for row in merge([merged, third]).rows] == [(8.0, 2), (5.0, 1)], (
        "all backends of a case come from one run"
    )


def test_the_table() -> None:
    rows = [
        row_of("triton", 9.0, eager_us=30.0, write_us=2.0, build_us=5.0, layer_us=20.0),
        row_of("flash_attn", 10.0),
        row_of("torch", 99999.0, how="eager", checked=False, note="no graph: it syncs"),
        row_of("flashinfer", reason="sinks are not supported"),
        row_of("wrong", status="wrong", reason="out over budget"),
    ]
    lines = case_lines(rows).splitlines()
    assert lines[0] == "decode-1x8k: q1s8192 · 32/8 heads"
    assert lines[1].split() == [
        "triton",
        "9.0",
        "11111",
        "GB/s",
        "50.0%",
        "0.900",
        "30.0",
        "2.0",
        "5.0",
        "20.0",
    ]
    assert lines[3].endswith("[eager; NOT CHECKED; no graph: it syncs]") and " 99999 " in lines[3]
    assert (
        "unsupported: sinks are not supported" in lines[4] and "WRONG: out over budget" in lines[5]
    )
    assert (
        "5 rows · 3 ok · 1 unsupported · 1 wrong · triton at most 1.00 x the time of the best "
        "other backend on 1 of 1 cases" in summary_line(rows, 3.0)
    )
    assert (
        heading(run_of()).splitlines()[1]
        == "peak rates: copy 100 GB/s, read 90 GB/s, a product 5 TFLOP/s"
    )


def test_the_table_of_the_documentation(tmp_path: Path) -> None:
    """One line for each case, with the columns of both chips, and the provenance of the files."""
    tables = generator("result_tables")
    rows = (
        row_of("triton", 9.0),
        row_of("flash_attn", 10.0, kernel="FlashAttention 3 (x)"),
        row_of("triton", 7.0, case="prefill-a"),
    )
    for chip in ("h200", "h100"):
        write_document(
            Document((run_of(),), rows[: 3 if chip == "h200" else 2]), tmp_path / chip / "a.json"
        )
    text = tables.table(["h200/a.json", "h100/a.json"], tmp_path)
    assert text.splitlines()[0] == (
        "| case | H200 us | of peak | vs best | H100 us | of peak | vs best |"
    )
    assert "| `decode-1x8k` | 9.0 | 50% | 0.90 | 9.0 | 50% | 0.90 |" in text
    assert "| `prefill-a` | 7.0 | 50% |  |  |  |  |" in text
    assert "- a chip: [h200/a.json](" in text and " at abc, peak " in text
    assert tables.versions(["h200/a.json", "h100/a.json"], tmp_path) == (
        "Versions: torch 2, triton 3, driver 4; flash_attn ran FlashAttention 3 (x).\n"
    )
    assert "decode" not in tables.table(["h200/a.json", "prefill-*"], tmp_path).split("- [")[0]
    assert "| 2 | `flash_attn` | 0.90 | 0.90 | 0.90 |" in tables.records(["h200/a.json"], tmp_path)


def test_the_documentation_shows_the_committed_results(tmp_path: Path) -> None:
    """docs/performance.md takes its tables from them; a wrong number is replaced."""
    tables = generator("result_tables")
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    assert len(tables.MARKED.findall(page)) > 4
    assert tables.fill(page) == page
    number = "| `decode-1x8k` | 12.5 |"
    assert number in page and tables.fill(page.replace(number, "| `decode-1x8k` | 1.0 |")) == page
