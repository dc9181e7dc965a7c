"""`attnlib doctor`."""

from __future__ import annotations

import json

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.cli import doctor, main
from attnlib.selection import unregister_backend


@pytest.fixture(autouse=True)
def _no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)


@pytest.mark.slow
def test_it_runs_a_batch_on_every_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also on one that only this process has registered. Each other one takes a process."""
    names = ["torch", "flashinfer", "mine"]
    monkeypatch.setattr("attnlib.selection.registry.list_backends", lambda: names)
    attnlib.register_backend("mine", TorchBackend)
    try:
        assert main(["doctor", "--json"]) == 0
    finally:
        unregister_backend("mine")
    findings = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in findings["backends"]}
    assert list(rows) == names
    assert rows["torch"]["works"] and "error" in rows["torch"]["finding"]
    assert rows["mine"]["works"] and not rows["flashinfer"]["works"]
    assert rows["flashinfer"]["finding"].startswith("unavailable: ")
    assert findings["versions"]["torch"] == torch.__version__


def test_a_section_that_raises_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other sections are still printed."""
    monkeypatch.setattr(doctor, "_machine", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "_backends", lambda: 1 / 0)
    assert main(["doctor"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
