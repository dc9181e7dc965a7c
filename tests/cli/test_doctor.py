"""`attnlib doctor`."""

from __future__ import annotations

import json

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.cli import doctor, main


@pytest.fixture(autouse=True)
def _no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)


@pytest.mark.slow
def test_it_runs_a_batch_on_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in findings["backends"]}
    assert rows["torch"]["works"] and "error" in rows["torch"]["finding"]
    assert findings["versions"]["torch"] == torch.__version__


def test_a_section_that_raises_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other sections are still printed."""
    monkeypatch.setattr(doctor, "_machine", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "_backends", lambda: 1 / 0)
    assert main(["doctor"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.slow
def test_backends_that_only_this_process_registered_are_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    attnlib.register_backend("mine", TorchBackend)
    try:
        assert main(["doctor", "--json"]) == 0
    finally:
        attnlib.unregister_backend("mine")
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    assert (
        rows["mine"]["works"]
        and not rows["flashinfer"]["works"]
        and rows["flashinfer"]["finding"].startswith("unavailable: ")
    )
