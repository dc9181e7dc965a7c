"""tests/corrected_defects.md lists every defect once, with tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECTION = "a8ef0b7 "
"""Prefix of the ids of the section about that commit."""
IDS = {
    *(f"D{number}" for number in range(1, 33)),
    *(f"T{number}" for number in range(1, 10)),
    *(f"{SECTION}A{number}" for number in range(1, 19)),
    *(f"{SECTION}B{number}" for number in range(1, 11)),
    *(f"{SECTION}C{number}" for number in range(1, 7)),
    *(f"{SECTION}D{number}" for number in range(1, 10)),
    f"{SECTION}E11",
}


def _rows() -> dict[str, list[str]]:
    """Id -> cells of its row. A row may have several ids."""
    found: dict[str, list[str]] = {}
    prefix = ""
    for line in (ROOT / "tests" / "corrected_defects.md").read_text().splitlines():
        if line.startswith("## "):
            prefix = SECTION if SECTION.strip() in line else ""
        if re.match(r"\| [A-Z]\d", line):
            ids, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            for name in ids.split(", "):
                assert prefix + name not in found, name
                found[prefix + name] = cells
    return found


def test_every_defect_is_listed() -> None:
    rows = _rows()
    assert set(rows) == IDS
    for name, cells in rows.items():
        also = name.startswith((f"{SECTION}A", f"{SECTION}B"))
        assert len(cells) == 4 + also and all([*cells[:3], cells[-1]]), name
        assert re.match("test|script|no", cells[-1]), name


def test_the_tests_exist() -> None:
    for name, cells in _rows().items():
        tests = re.findall(r"`((?:tests/|::)[^`]+)`", cells[0])
        assert tests, name
        path = ""
        for test in tests:
            given, _, function = test.partition("::")
            path = given or path
            assert (ROOT / path).is_file(), f"{name}: {path}"
            defined = f"\ndef {function}(" in (ROOT / path).read_text()
            assert not function or defined, f"{name}: {test}"
