"""Backends that installed packages offer: found once, imported late, and a broken one is one warning with its name (never silence, never a crash)."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.selection import availability, registry

SPEC = attnlib.AttentionSpec(num_heads=4, head_size=16, dtype=torch.float32)
Offer = Callable[..., None]


class Offered(TorchBackend):
    """What the pretended package holds."""

    @staticmethod
    def get_name() -> str:
        return "offered"


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Offer]:
    """Pretend that a package offers these entry points (name -> value)."""
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_plugins_read", False)
    monkeypatch.setattr(availability, "_warned", set())

    def pretend(*points: tuple[str, str]) -> None:
        folder = tmp_path / "pretended-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pretended\nVersion: 1.0\n")
        distribution = PathDistribution(folder)
        found = [
            EntryPoint(name, value, registry.ENTRY_POINT_GROUP)._for(distribution)
            for name, value in points
        ]
        monkeypatch.setattr(registry, "entry_points", lambda group: found)

    yield pretend
    registry._generation += 1  # the cache must not remember what was pretended


def test_an_offered_backend_is_used_by_name_and_never_by_auto(offer: Offer) -> None:
    offer(("Offered", f"{__name__}:Offered"))
    assert "offered" in attnlib.list_backends() and registry.lookup("OFFERED").origin == "pretended"
    assert attnlib.get_attn_backend(SPEC, "offered", "cpu") is Offered
    assert attnlib.get_attn_backend(SPEC, device="cpu") is TorchBackend


def test_a_broken_one_is_one_warning_with_both_names(offer: Offer) -> None:
    """Taste 14: and the others never notice."""
    offer(("broken", "no_such_module_at_all:Backend"))
    with pytest.warns(
        UserWarning,
        match="'broken' offered by pretended is broken and left out: ModuleNotFoundError.*no_such_module",
    ) as caught:
        assert attnlib.explain(SPEC, "cpu").chosen == "torch"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attnlib.explain(SPEC, "cpu").reasons()["broken"][0].startswith("ModuleNotFoundError")
    with pytest.raises(
        attnlib.errors.BackendUnavailableError, match=r"pretended|package version unknown"
    ):
        attnlib.get_attn_backend(SPEC, "broken", "cpu")


def test_names_that_are_taken_or_impossible_are_left_out(offer: Offer) -> None:
    offer(("torch", f"{__name__}:Offered"), ("auto", "a:B"), ("dotted", "a.B"))
    with pytest.warns(UserWarning) as caught:
        names = attnlib.list_backends()
    texts = " | ".join(str(warning.message) for warning in caught)
    assert "backend 'torch' offered by pretended is ignored: the name is taken (built in)" in texts
    assert (
        "backend 'auto' = 'a:B' offered by pretended is ignored" in texts
        and "backend 'dotted' = 'a.B'" in texts
    )
    assert registry.lookup("torch").origin == "built in" and not {"auto", "dotted"} & set(names)


def test_damaged_metadata_of_any_package_is_one_warning(
    offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(group: str) -> None:
        raise ValueError("bad METADATA")

    monkeypatch.setattr(registry, "entry_points", damaged)
    with pytest.warns(UserWarning, match="cannot be listed: ValueError: bad METADATA"):
        assert "torch" in attnlib.list_backends()
    assert attnlib.get_attn_backend(SPEC, device="cpu") is TorchBackend


def test_plugins_can_be_switched_off(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(("offered", f"{__name__}:Offered"))
    monkeypatch.setenv("ATTNLIB_PLUGINS", "0")
    assert "offered" not in attnlib.list_backends()


def test_the_first_look_at_packages_selects_and_logs_once(
    offer: Offer, caplog: pytest.LogCaptureFixture
) -> None:
    """S2: one line, although reading the entry points changes the registry in the middle."""
    offer(("offered", f"{__name__}:Offered"))
    spec = SPEC.replace(head_size=88)
    with caplog.at_level("INFO", logger="attnlib"):
        for _ in range(3):
            attnlib.get_attn_backend(spec, device="cpu")
    assert len(caplog.records) == 1


def test_a_worker_process_gets_the_same_class() -> None:
    """What selection returns travels by pickle: a class with settings, and a pair, into a fresh interpreter that registered nothing."""
    program = (
        "import pickle, sys, torch, attnlib\n"
        "attnlib.register_backend('tuned', 'attnlib.backends.torch:TorchBackend', config={'tile': 64})\n"
        "spec = attnlib.AttentionSpec(num_heads=4, head_size=16, dtype=torch.float32)\n"
        "tuned = attnlib.get_attn_backend(spec, 'tuned', 'cpu')\n"
        "pair = attnlib.get_attn_backend(spec, 'prefill:tuned,decode:torch', 'cpu')\n"
        "sys.stdout.write(pickle.dumps((tuned, pair)).hex())"
    )
    reader = (
        "import pickle, sys\n"
        "tuned, pair = pickle.loads(bytes.fromhex(sys.stdin.read()))\n"
        "print(tuned.config, pair.prefill_backend is tuned, pair.get_name(), pair.make_builder.__self__ is pair)"
    )
    written = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    read = subprocess.run(
        [sys.executable, "-c", reader], input=written, capture_output=True, text=True, check=True
    ).stdout
    assert read.strip() == "{'tile': 64} True prefill:torch,decode:torch True"
