"""docs/compatibility.md: one line for each row of the table, with what the row claims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.compat.seeds.rows import ROWS, SEEDS
from tests.compat.seeds.table import Row
from tests.generated_pages import generator

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
MOST_WORDS = 3000


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text().split()) <= MOST_WORDS


def test_the_page_has_every_row_once() -> None:
    """In order, with its claim and the reason of a difference; `test_docs.py` compares the text."""
    lines = re.findall(r"^(\d\.\d\d) (.+?)(?: \| (.+))?$", PAGE.read_text(), re.M)
    assert [number for number, *_ in lines] == [row.number for row in ROWS]
    for (_, _, cell), row in zip(lines, ROWS, strict=True):
        if row.claim.kind == "same":
            assert re.fullmatch(r"(from `[\w.]+`)?", cell)
        else:
            claim = f"{row.claim.kind}: {row.claim.text}"
            assert re.match(rf"{re.escape(claim)}(; |$)", cell)


@pytest.mark.parametrize("module", sorted({row.module for row in ROWS}))
def test_the_import_lines_run(module: str) -> None:
    """Those of the rows; and the page names the modules."""
    row = next(row for row in ROWS if row.module == module)
    names: dict[str, object] = {}
    exec(row.import_line, names)
    assert names[module.rpartition(".")[2]].__name__ == module  # type: ignore[attr-defined]
    assert f"`{module}`" in PAGE.read_text()


def test_the_table_of_rows() -> None:
    """Arguments after the first one are left out, and the notes of rows that are the same; other
    modules, notes and claims are not."""
    rows = generator("compatibility_rows")
    row: Row = (
        SEEDS[0]
        .rows[0]
        ._replace(
            number="9.01",
            name="`f(a, b=1)` of `g(a)` and `h()`",
            module="other",
            note="a note",
        )
    )
    same = row._replace(claim=row.claim._replace(kind="same", text=""))
    differs = row._replace(claim=row.claim._replace(kind="differs", text="why"), module="own")
    plain = same._replace(module="own")
    assert rows.table([plain, same, differs], "own").splitlines()[2:] == [
        "9.01 `f(a, ...)` of `g(a)` and `h()`",
        "9.01 `f(a, ...)` of `g(a)` and `h()` | from `other`",
        "9.01 `f(a, ...)` of `g(a)` and `h()` | differs: why; a note",
    ]
    assert rows.counts([same, differs]).splitlines()[2:] == [
        f"{row.document} | 1 | 0 | 1",
        "all | 1 | 0 | 1",
    ]
