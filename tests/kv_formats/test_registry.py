"""Open formats by name."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib.errors import ContractError, RegistrationError
from attnlib.kv_dtype import kv_cache_format
from attnlib.kv_formats import (
    PAGE_FORMATS,
    KVFormat,
    find_kv_format,
    installed_kv_formats,
    load_kv_format,
    register_kv_format,
    registry,
    unregister_kv_format,
)
from tests.kv_formats.conftest import MODULE


def test_a_registered_format_is_found(rotated4: KVFormat) -> None:
    assert find_kv_format("example:rotated4", version=1) is rotated4
    assert kv_cache_format("example:rotated4", torch.bfloat16) is rotated4
    assert register_kv_format(rotated4) is rotated4, "a module may be imported twice"
    assert installed_kv_formats() == [rotated4]


def test_what_cannot_be_registered(rotated4: KVFormat) -> None:
    with pytest.raises(RegistrationError, match="is already registered"):
        register_kv_format(replace(rotated4, version=2))
    with pytest.raises(RegistrationError, match="needs a name of the form package:name"):
        register_kv_format(replace(rotated4, name="nvfp4"))
    with pytest.raises(RegistrationError, match="is not a KV format"):
        register_kv_format("example:rotated4")  # type: ignore[arg-type]  # what is refused
    for name in ("nvfp4", "example:other"):
        with pytest.raises(RegistrationError, match="no open KV format"):
            unregister_kv_format(name)
    assert find_kv_format("nvfp4") is PAGE_FORMATS["nvfp4"]


def test_no_path_replaces_a_format_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from attnlib.kv_formats import PAGE_FORMATS\n"
        "import dataclasses\n"
        "OWN = dataclasses.replace(PAGE_FORMATS['nvfp4'], error=0.5)\n"
    )
    with pytest.raises(RegistrationError, match="'nvfp4' needs a name of the form package:name"):
        load_kv_format(f"{tmp_path / 'own.py'}:OWN")


def test_an_unknown_name_lists_the_known_ones(rotated4: KVFormat) -> None:
    with pytest.raises(ContractError, match="no KV format is named 'a:b'.*example:rotated4"):
        kv_cache_format("a:b", torch.bfloat16)
    with pytest.raises(ContractError, match="no KV format is named 'fp8'.*nvfp4"):
        load_kv_format("fp8")


def _point(monkeypatch: pytest.MonkeyPatch, path: str, name: str = "rotated4") -> None:
    points = [EntryPoint(name, path, registry.ENTRY_POINT_GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)


def test_an_entry_point_is_imported_when_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MODULE.parent))
    _point(monkeypatch, "rotated4:ROTATED_4BIT")
    with pytest.raises(ContractError, match="no KV format is named 'example:rotated3'"):
        find_kv_format("example:rotated3")
    with pytest.raises(ContractError, match="no KV format is named 'other:rotated4'"):
        find_kv_format("other:rotated4")
    try:
        assert find_kv_format("example:rotated4").version == 1
        assert [one.name for one in installed_kv_formats()] == ["example:rotated4"]
    finally:
        unregister_kv_format("example:rotated4")
    monkeypatch.setenv("ATTNLIB_PLUGINS", "0")
    with pytest.raises(ContractError, match="no KV format is named 'example:rotated4'"):
        find_kv_format("example:rotated4")


def test_a_broken_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _point(monkeypatch, "no_such_module:FORMAT")
    with pytest.raises(ContractError, match="rotated4 = no_such_module:FORMAT cannot be imported"):
        find_kv_format("example:rotated4")
    with pytest.warns(UserWarning, match="no_such_module"):
        assert installed_kv_formats() == []
    _point(monkeypatch, "attnlib.errors:ContractError")
    with pytest.raises(RegistrationError, match="is not a KV format"):
        find_kv_format("example:rotated4")


def test_a_broken_package_hides_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two packages with a format of one name, only the named one must be imported."""
    monkeypatch.syspath_prepend(str(MODULE.parent))
    points = [
        EntryPoint("rotated4", path, registry.ENTRY_POINT_GROUP)
        for path in ("no_such_module:FORMAT", "rotated4:ROTATED_4BIT")
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    try:
        assert find_kv_format("example:rotated4").version == 1
    finally:
        unregister_kv_format("example:rotated4")


def test_specs_take_the_name(rotated4: KVFormat) -> None:
    from attnlib.spec import AttentionSpec

    fields: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "dtype": torch.bfloat16}
    spec = AttentionSpec(**fields, head_size=64, kv_cache_dtype="example:rotated4")
    assert spec.kv_format is rotated4 and spec.scales_in_page and spec.is_kv_quantized
    assert spec.kv_bytes_per_token == 2 * 2 * (32 + 2)
    for values in ("auto", "int8_per_token_head", "mxfp4"):
        pair = spec.replace(value_cache_dtype=values)
        assert (pair.kv_format, pair.value_format.bits) == (
            rotated4, {"auto": 16, "int8_per_token_head": 8, "mxfp4": 4}[values],
        )  # fmt: skip
    with pytest.raises(ContractError, match="no cache combines them"):
        spec.replace(value_cache_dtype="fp8_e4m3")
    with pytest.raises(ContractError, match="is a KVFormat; pass a dtype or a name"):
        spec.replace(kv_cache_dtype=rotated4)
    with pytest.raises(ContractError, match="head_size=63 must be a multiple of 2"):
        spec.replace(head_size=63)
    with pytest.raises(ContractError, match="stores keys and values separately, and use_mla"):
        spec.replace(num_kv_heads=1, use_mla=True)
