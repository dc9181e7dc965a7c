"""`attnlib list`."""

from __future__ import annotations

import json

import pytest

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.cli import main
from attnlib.selection import unregister_backend


def test_the_table_and_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--device", "cpu"]) == 0
    assert "torch           available    plain torch, on any device" in capsys.readouterr().out
    assert main(["list", "--device", "cpu", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    assert (
        rows["torch"]["available"]
        and not rows["flashinfer"]["available"]
        and rows["flashinfer"]["reasons"]
    )


def test_columns_fit_the_longest_name_and_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """D6: a long name widens the column, and reasons wrap below it."""
    name = "a_backend_with_a_rather_long_name"
    attnlib.register_backend(name, type("Long", (TorchBackend,), {"description": ""}))
    try:
        assert main(["list", "--device", "cpu"]) == 0
    finally:
        unregister_backend(name)
    _, *lines = capsys.readouterr().out.splitlines()
    column = len(f"  {name}  ")
    firsts = [line for line in lines if line[2] != " "]
    assert {line.split()[0] for line in firsts} >= {name, "torch", "flashinfer_mla"}
    assert all(line[column:].startswith(("available", "unavailable ")) for line in firsts)
    assert f"  {name}  available" in lines  # it has no description
    assert all(len(line) <= 100 or " " not in line.strip() for line in lines)
    text = column + len("unavailable  ")
    assert all(line[:text].isspace() for line in lines if line not in firsts)
