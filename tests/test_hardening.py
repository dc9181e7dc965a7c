"""tests/corrected_defects.md lists every defect once, with tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
IDS = [*(f"D{number}" for number in range(1, 33)), *(f"T{number}" for number in range(1, 10))]


def _rows() -> dict[str, list[str]]:
    """Id -> cells of its row."""
    text = (ROOT / "tests" / "corrected_defects.md").read_text()
    rows = [
        line.strip("|").split("|") for line in text.splitlines() if re.match(r"\| [DT]\d", line)
    ]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}


def test_every_defect_is_listed() -> None:
    rows = _rows()
    assert sorted(rows) == sorted(IDS)
    for name, cells in rows.items():
        assert len(cells) == 4 and all(cells), name
        assert re.match("test|script|no", cells[3]), name


def test_the_tests_exist() -> None:
    for name, cells in _rows().items():
        tests = re.findall(r"`(tests/[^`]+)`", cells[0])
        assert tests, name
        for test in tests:
            path, _, function = test.partition("::")
            assert (ROOT / path).is_file(), f"{name}: {path}"
            defined = f"\ndef {function}(" in (ROOT / path).read_text()
            assert not function or defined, f"{name}: {test}"
