"""`attnlib list`."""

from __future__ import annotations

import json

import pytest

from attnlib.cli import main


def test_the_table_and_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--device", "cpu"]) == 0
    assert "torch        available    plain torch, on any device" in capsys.readouterr().out
    assert main(["list", "--device", "cpu", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    assert (
        rows["torch"]["available"]
        and not rows["flashinfer"]["available"]
        and rows["flashinfer"]["reasons"]
    )
