"""tests/compat/names.md: the code of each row runs and has the value that the row shows; and
docs/compatibility.md names what the rows name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "tests" / "compat" / "names.md"
ROW = re.compile(r"^\| (?P<name>.+?) \| `(?P<code>[^`]+)` \| `(?P<value>[^`]*)`(?P<note>.*) \|$")
SETUP = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Row(NamedTuple):
    """One row: its section, what it is about, the code, and the value of the code."""

    section: int
    name: str
    code: str
    value: str


SECTIONS = PAGE.read_text().split("\n## ")[1:]
ROWS = [
    Row(number, match["name"], match["code"], match["value"])
    for number, section in enumerate(SECTIONS)
    for line in section.splitlines()
    if (match := ROW.match(line))
]
EXPECTED_ROWS = [23, 41, 27, 31, 13]
"""Names and behaviors of the five modules that the page follows."""


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """The names that the setup blocks define, in order, as in one session."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ATTNLIB_BACKEND", "ATTNLIB_KV_CACHE_LAYOUT", "ATTNLIB_VALIDATE"):
            patch.delenv(name, raising=False)
        found: dict[str, Any] = {"__name__": "compatibility_page"}
        for section in SECTIONS:
            setup = SETUP.search(section)
            assert setup is not None
            exec(compile(setup[1], str(PAGE), "exec"), found)
        yield found


def test_every_row_is_found() -> None:
    """Also that no line of a table was skipped by the pattern."""
    assert [sum(row.section == n for row in ROWS) for n in range(len(SECTIONS))] == EXPECTED_ROWS
    lines = [line for section in SECTIONS for line in section.splitlines() if line[:2] == "| "]
    assert len(lines) == len(ROWS) + len(SECTIONS)  # and one head per table


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section + 1}:{row.name[:40]}")
def test_the_code_of_a_row_has_its_value(row: Row, names: dict[str, Any]) -> None:
    assert repr(eval(row.code, names)) == row.value


def test_a_wrong_value_is_found(names: dict[str, Any]) -> None:
    """The comparison can fail."""
    row = ROWS[0]._replace(value="'myvllm'")
    with pytest.raises(AssertionError):
        test_the_code_of_a_row_has_its_value(row, names)


def test_the_page_names_what_the_rows_name() -> None:
    """Each identifier of a row's first column is in the section of the page."""
    sections = (ROOT / "docs" / "compatibility.md").read_text().split("\n## ")[1:]
    assert len(sections) == len(SECTIONS)
    for number, section in enumerate(sections):
        named = {name for row in ROWS if row.section == number for name in identifiers(row.name)}
        missing = sorted(name for name in named if name not in section)
        assert not missing, f"the section {section.splitlines()[0]!r} lacks {missing}"


def identifiers(cell: str) -> list[str]:
    """The names in the code of a cell, without arguments."""
    code = [re.sub(r"\(.*", "", text) for text in re.findall(r"`([^`]+)`", cell)]
    return [name for name in code if re.fullmatch(r"[\w.]+", name) and name != "nn.Module"]
