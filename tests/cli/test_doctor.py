"""`attnlib doctor`."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, PackageNotFoundError

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.cli import doctor, main
from attnlib.integrations.features import features_of
from attnlib.kv_formats import KVFormat, registry
from attnlib.selection import unregister_backend
from tests.kv_formats.conftest import rotated4

__all__ = ["rotated4"]


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
    shown: list[str] = []

    def backends() -> None:  # they take longest
        shown.append(capsys.readouterr().out)
        raise ValueError("no backend")

    monkeypatch.setattr(doctor, "_machine", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "_backends", backends)
    assert main(["doctor"]) == 1
    assert "ZeroDivisionError" in shown[0] and shown[0].endswith("\nbackends\n")
    assert "ValueError: no backend" in capsys.readouterr().out


def test_open_formats_and_caches(
    rotated4: KVFormat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package that cannot be imported is named; keys of 4 bits get a warning."""
    monkeypatch.setattr(doctor, "_backends", list)
    broken = EntryPoint("broken", "no_such_module:FORMAT", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken])
    main(["doctor", "--kv-cache-dtype", "int4_per_group"])
    out = capsys.readouterr().out
    assert f"  {rotated4.name:<24} version 1, read by torch, triton\n" in out
    assert "KV format broken = no_such_module:FORMAT cannot be imported" in out
    assert "\ncaches\n  layer                    warning: keys of 4 bits without a rotation" in out
    main(["doctor", "--kv-cache-dtype", "int4_per_group", "--kv-rotation", "hadamard"])
    assert "warning: keys" not in capsys.readouterr().out
    main(["doctor"])
    assert "\ncaches\n" not in capsys.readouterr().out


def test_features_of_installed_engines_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one supported release, and of one that is not; nothing without engines."""
    installed = {"vllm": "0.33.1", "sglang": "0.4.0"}

    def version(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "_backends", lambda: [])
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "KV connectors" in printed and "refused: ExampleConnector misreads them" in printed
    assert "no tested release: 0.5.17, 0.5.23" in printed
    assert main(["doctor", "--json"]) == 1
    engines = json.loads(capsys.readouterr().out)["engines"]
    assert engines["vllm 0.33.1"] == features_of("vllm", "0.33.1")
    installed.clear()
    main(["doctor"])
    assert "engines" not in capsys.readouterr().out
