"""The JSON document of a tuning table: it grows, new lines replace old ones, and other files are
kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnlib import tuning
from attnlib.bench.case_text import parse_case
from attnlib.errors import ContractError
from attnlib.tuning.document import merged, read_document, write_document

LAYER = tuning.layer_class(parse_case("q1s64").spec)
RANKING = {"layer": LAYER, "ranking": ["torch"], "relative": {"torch": 1.0}, "provenance": "old"}


def _line(group: str, number: int, provenance: str) -> dict[str, Any]:
    return {"group": group, "parameters": {"n": number}, "provenance": provenance}


def _merged(document: dict[str, Any], name: str, *lines: dict[str, Any], ranks: Any = ()) -> Any:
    keys = {"toy": lambda line: line["group"]}
    return merged(document, name, {"date": name}, {"toy": lines}, ranks, keys)


def test_new_lines_replace_those_with_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "chip.json"
    old = [_line("a", 1, "old"), _line("b", 1, "old")]
    write_document(path, _merged(read_document(path, "cpu"), "old", *old, ranks=[RANKING]))
    new = _line("a", 2, "new")
    write_document(path, _merged(read_document(path, "cpu"), "new", new))
    found = read_document(path, "cpu")
    assert found["parameters"]["toy"] == [new, old[1]] and found["backends"] == [RANKING]
    assert set(found["provenance"]) == {"old", "new"}
    assert len(path.read_text().splitlines()) < 25, "one line for each table line"


def test_descriptions_of_runs_without_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    write_document(path, _merged(read_document(path, "cpu"), "old", _line("a", 1, "old")))
    write_document(path, _merged(read_document(path, "cpu"), "new", _line("a", 2, "new")))
    assert set(read_document(path, "cpu")["provenance"]) == {"new"}


def test_tables_with_tiles_at_the_top_level_are_read(tmp_path: Path) -> None:
    """The form before parameters were stored by backend."""
    path, line = tmp_path / "chip.json", {"op": "decode", "tile": {}, "provenance": "old"}
    document = {"schema": 1, "chip": "cpu", "provenance": {"old": ""}, "tiles": [line]}
    path.write_text(json.dumps(document))
    found = read_document(path, "cpu")
    assert found["parameters"] == {"triton": [line]} and "tiles" not in found


def test_files_of_another_kind_or_chip_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    write_document(path, _merged(read_document(path, "cpu"), "old", _line("a", 1, "old")))
    message = "is the table of 'cpu' and this is 'NVIDIA H200': write to another file"
    with pytest.raises(ContractError, match=message):
        read_document(path, "NVIDIA H200")
    path.write_text("[]")
    with pytest.raises(ContractError, match="is not a tuning table"):
        read_document(path, "cpu")
