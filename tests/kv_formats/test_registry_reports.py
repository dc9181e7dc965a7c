"""Open formats in recordings, audits and reports (P16)."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import attnlib
from attnlib.cli import audit_kv
from attnlib.cli import list as list_command
from attnlib.debug.kv_audit import audit_call, audit_formats, named_format
from attnlib.debug.record import load_recording, save_recording
from attnlib.debug.replay import replay
from attnlib.errors import ContractError
from attnlib.integrations.vllm.format_names import is_page_name, stored_fields
from attnlib.kv_formats import KVFormat, register_kv_format, registry, unregister_kv_format
from attnlib.testing.case import Case
from tests.debug.recorded_calls import captured
from tests.kv_formats.conftest import MODULE

CASE = Case(batch="mixed", kv_cache_dtype="example:rotated4", layout="HND_INTERLEAVED")


@pytest.mark.parametrize("kv_written", [True, False])
def test_a_recording_holds_the_version(
    rotated4: KVFormat, kv_written: bool, tmp_path: Path
) -> None:
    path = save_recording(captured(CASE, kv_written=kv_written), tmp_path / "call.pt")
    loaded = load_recording(path)
    assert loaded.spec.kv_format is rotated4
    result = replay(loaded, "torch")
    assert result.passed, str(result)
    unregister_kv_format(rotated4.name)
    try:
        with pytest.raises(ContractError, match="call.pt cannot be read: no KV format is named"):
            load_recording(path)
        register_kv_format(replace(rotated4, version=3))
        with pytest.raises(ContractError, match="are of version 1 of .* has version 3"):
            load_recording(path)
        unregister_kv_format(rotated4.name)
    finally:
        register_kv_format(rotated4)


def test_a_damaged_version_is_refused(rotated4: KVFormat, tmp_path: Path) -> None:
    path = save_recording(captured(CASE), tmp_path / "call.pt")
    data = torch.load(path, weights_only=True)
    assert data["kv_formats"] == {"example:rotated4": 1}
    for broken in (7, {5: 1}, {"nvfp4": 2}, {"example:rotated4": "1"}):
        torch.save({**data, "kv_formats": broken}, path)
        with pytest.raises(ContractError, match="cannot be read"):
            load_recording(path)


def test_the_audit_has_a_row(rotated4: KVFormat, tmp_path: Path) -> None:
    """A Gaussian head has the error that the format states; nothing is called saturated."""
    labels = [one.label for one in audit_formats()]
    assert labels[-1] == "example:rotated4, rotated" and "example:rotated4" not in labels
    step = captured(Case(batch="mixed", head_size=64))
    found = audit_call(step, audit_formats()[-1:])["example:rotated4, rotated"]
    assert 0.01 < found.output_error < 0.2 and found.saturation == 0.0
    assert found.bytes_per_token == step.spec.num_kv_heads * 2 * (32 + 2)
    path = save_recording(step, tmp_path / "call.pt")
    out = tmp_path / "audit.json"
    row = ["--formats", "example:rotated4, rotated;nvfp4"]
    assert audit_kv.main(["--recordings", str(path), *row, "--json", str(out)]) == 0
    assert set(json.loads(out.read_text())["total"]) == {"example:rotated4, rotated", "nvfp4"}


def test_the_audit_takes_sides_and_paths(rotated4: KVFormat) -> None:
    """What no label says: one side of an open format, or one at a path."""
    for text, sides, rotation in (
        ("int8_per_token_head,example:rotated4+hadamard", (8, 4), "hadamard"),
        (f"{MODULE}:ROTATED_4BIT,auto", (4, 32), None),
        ("fp8_e4m3+hadamard_keys", (8, 8), "hadamard_keys"),
    ):
        one = named_format(text)
        spec = attnlib.AttentionSpec(
            num_heads=1, head_size=64, dtype=torch.float32, **one.spec_fields
        )
        assert (spec.kv_format.bits, spec.value_format.bits) == sides
        assert one.kv_rotation == rotation
    assert named_format("nvfp4, keys").value_cache_dtype == "auto"
    path = named_format(f"{MODULE}:ROTATED_4BIT")
    assert (path.label, path.scales) == (rotated4.name, "page")
    assert named_format("fp8_e4m3,fp8_e4m3").scales == "tensor"
    exact = [named_format("auto"), named_format("float32")]
    for found in audit_call(captured(Case(batch="mixed", dtype="float32")), exact).values():
        assert found.max_error == found.max_lse_error == 0.0, "stored as they are"
    for text in ("fp3", "nvfp4,nvfp4,nvfp4", "nvfp4+turned", "nvfp4,", f"{MODULE}:NOTHING"):
        with pytest.raises(ContractError):
            named_format(text)


def test_explain_names_format_version_and_rotation(rotated4: KVFormat) -> None:
    spec = attnlib.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.float32,
        kv_cache_dtype="example:rotated4",
    )  # fmt: skip
    text = " ".join(str(attnlib.explain(spec, "cpu")).split())
    assert "keys are stored as example:rotated4, version 1: 4.25 bits" in text
    assert "warning: example:rotated4 is made for rotated values: set kv_rotation" in text
    assert "warning: keys of 4 bits without a rotation" in text
    assert "chose torch" in text
    rotated = str(attnlib.explain(spec.replace(kv_rotation="hadamard"), "cpu"))
    assert "warning" not in rotated and "values are stored as example:rotated4" in rotated


def test_the_list_names_it(rotated4: KVFormat, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_command.main(["--device", "cpu"]) == 0
    assert "  example:rotated4, version 1" in capsys.readouterr().out
    assert list_command.main(["--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_formats"] == {"example:rotated4": 1} and not found["kv_format_failures"]


def test_the_list_names_a_broken_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = EntryPoint("broken", "no_such_module:FORMAT", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert list_command.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "  unavailable: KV format broken = no_such_module:FORMAT cannot be imported" in out


def test_vllm_takes_all_pairs(rotated4: KVFormat) -> None:
    """Of open formats with each other and with those of the library, as specs do."""
    other = register_kv_format(replace(rotated4, name="example:other"))
    try:
        for sides in ("{},{}", "{},{}+hadamard"):
            for pair in (
                (rotated4.name, other.name),
                (other.name, "mxfp4"),
                ("float16", other.name),
            ):
                assert is_page_name(sides.format(*pair))
        assert not is_page_name("nvfp4,int8_per_token_head")
        assert stored_fields(f"{rotated4.name},{other.name}")["value_cache_dtype"] == other.name
    finally:
        unregister_kv_format(other.name)
