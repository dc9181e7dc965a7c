"""The tuning table of a chip: read once, used by selection, ignored with a warning if unusable."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
from attnlib import tuning
from attnlib.backends.torch import TorchBackend
from attnlib.device import DeviceInfo
from attnlib.selection import unregister_backend
from tests.fresh_process import run_program

SPEC = attnlib.AttentionSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float32)
CPU, H200 = DeviceInfo("cpu"), DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")


class Rival(TorchBackend):
    """The torch backend under another name."""

    @staticmethod
    def get_name() -> str:
        return "rival"


def _document(**changes: Any) -> dict[str, Any]:
    ranking = {
        "layer": tuning.layer_class(SPEC),
        "ranking": ["rival", "torch"],
        "relative": {"rival": 1.0, "torch": 1.25},
        "provenance": "now",
    }
    return {
        "schema": 1,
        "chip": "cpu",
        "provenance": {"now": {}},
        "parameters": {},
        "backends": [ranking],
        **changes,
    }


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table in use."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(_document()))
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    monkeypatch.setenv("ATTNLIB_TUNING", str(path))
    tuning.clear_cache()
    return path


@pytest.fixture
def rival() -> Any:
    """A backend with a lower priority than torch."""
    attnlib.register_backend("rival", Rival, priority=50)
    yield
    unregister_backend("rival")


def test_auto_follows_the_table_and_explain_names_it(
    table: Path, rival: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speed rules: a ranking measured on this chip precedes priorities, for layers of its class."""
    assert attnlib.get_attn_backend(SPEC, device="cpu") is Rival
    report = {c.name: c for c in attnlib.explain(SPEC, "cpu").candidates}
    assert report["rival"].reasons == (
        f"measured fastest of rival, torch for such layers on this chip: {table}",
    )
    assert report["torch"].reasons == ("measured at 1.25 x the time of rival",)
    same_class = SPEC.replace(num_heads=16, num_kv_heads=4)
    assert attnlib.get_attn_backend(same_class, device="cpu") is Rival, "same group size"
    for other in (
        SPEC.replace(head_size=32),
        SPEC.replace(has_sink=True),
        SPEC.replace(num_heads=4),
        SPEC.replace(block_size=32),
    ):
        assert attnlib.get_attn_backend(other, device="cpu") is TorchBackend, other
    explicit = attnlib.get_attn_backend(SPEC, "torch", "cpu")
    assert explicit is TorchBackend, "an explicit request is granted"
    monkeypatch.setenv("ATTNLIB_TUNING", "off")
    assert attnlib.get_attn_backend(SPEC, device="cpu") is TorchBackend, "changes apply at once"


def test_backends_that_the_table_does_not_rank_keep_their_position(
    table: Path, rival: None
) -> None:
    newest = type("Newest", (TorchBackend,), {"get_name": staticmethod(lambda: "newest")})
    attnlib.register_backend("newest", newest, priority=900)
    try:
        assert attnlib.get_attn_backend(SPEC, device="cpu").get_name() == "newest"
        names = [c.name for c in attnlib.explain(SPEC, "cpu").candidates]
        assert names.index("newest") < names.index("rival") < names.index("torch")
    finally:
        unregister_backend("newest")


UNUSABLE = {
    "not JSON": ("{", r"mine.json: JSONDecodeError"),
    "another chip": (
        json.dumps(_document(chip="NVIDIA H200")),
        r"mine.json was measured on 'NVIDIA H200' and this is 'cpu': run attnlib tune here",
    ),
    "another schema": (
        json.dumps(_document(schema=9)),
        r"mine.json has schema 9 and this version reads 1",
    ),
    "parameters without a backend": (
        json.dumps(_document(parameters=[])),
        r"mine.json needs .* 'parameters' \(an object of lists\)",
    ),
    "an empty ranking": (
        json.dumps(_document(backends=[{"layer": {}, "ranking": [], "relative": {}}])),
        r"backends\[0\]: ranking=\[\] must",
    ),
    "a backend twice": (
        json.dumps(
            _document(backends=[{"layer": {}, "ranking": ["a", "a"], "relative": {"a": 1}}])
        ),
        r"names a backend twice",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_an_unusable_table_is_one_warning(kind: str, table: Path, rival: None) -> None:
    text, words = UNUSABLE[kind]
    table.write_text(text)
    tuning.clear_cache()
    with pytest.warns(UserWarning, match=words + r"[\s\S]*ATTNLIB_TUNING=off ignores"):
        assert attnlib.get_attn_backend(SPEC, device="cpu") is TorchBackend
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attnlib.explain(SPEC, "cpu").chosen == "torch"


def test_a_table_that_does_not_exist_is_a_warning_only_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ATTNLIB_TUNING", raising=False)
    tuning.clear_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.tuning_for(CPU) is None
    assert tuning.table_path("NVIDIA H200") == tmp_path / ".cache/attnlib/tuning/nvidia-h200.json"
    monkeypatch.setenv("ATTNLIB_TUNING", str(tmp_path / "gone.json"))
    with pytest.warns(UserWarning, match="gone.json: FileNotFoundError"):
        assert tuning.tuning_for(CPU) is None


def test_devices_without_hardware_have_no_table() -> None:
    assert tuning.chip_name(CPU) == "cpu" and tuning.chip_name(H200) == "NVIDIA H200"
    assert (
        tuning.chip_name(DeviceInfo("cuda", 0, (9, 0), name="hypothetical", is_hypothetical=True))
        is None
    )
    assert tuning.chip_name(DeviceInfo("cuda", 0, None, name="no such device")) is None


@pytest.mark.slow
def test_the_table_is_read_once_and_not_at_import(table: Path) -> None:
    program = """
import sys
opened = []
sys.addaudithook(lambda name, args: opened.append(str(args[0])) if name == "open" else None)
import attnlib, attnlib.selection, attnlib.tuning, torch
assert not [each for each in opened if each.endswith("mine.json")]
spec = attnlib.AttentionSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float32)
for size in (64, 32, 16):
    attnlib.get_attn_backend(spec.replace(head_size=size), device="cpu")
    attnlib.explain(spec, "cpu")
assert len([each for each in opened if each.endswith("mine.json")]) == 1, opened
"""
    done = run_program(program)
    assert done.returncode == 0, done.stderr


def test_layers_of_one_class() -> None:
    assert tuning.layer_class(SPEC)["features"] == []
    busy = SPEC.replace(
        sliding_window=8,
        logits_soft_cap=5.0,
        has_sink=True,
        has_alibi=True,
        attn_type="encoder_only",
    )
    assert tuning.layer_class(busy)["features"] == [
        "encoder_only",
        "window",
        "soft cap",
        "alibi",
        "sinks",
    ]
    fp8 = SPEC.replace(kv_cache_dtype="fp8")
    assert tuning.layer_class(fp8)["kv_cache_dtype"] == "float8_e4m3fn"
    pages = SPEC.replace(kv_cache_dtype="fp8_per_token_head")
    assert tuning.layer_class(pages)["kv_cache_dtype"] == "fp8_per_token_head"
    assert json.loads(json.dumps(tuning.layer_class(busy))) == tuning.layer_class(busy)
