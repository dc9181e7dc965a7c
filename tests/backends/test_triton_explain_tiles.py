"""The line of `explain` about the tiles of the `triton` backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib import AttentionSpec, tuning
from attnlib.backends.triton import TritonBackend, explain_tiles
from attnlib.device import DeviceInfo, resolve_device
from attnlib.sparse.key_selection import KeySelection
from attnlib.tuning.table import Tuning

H100 = DeviceInfo(type="cuda", name="NVIDIA H100 80GB HBM3", capability=(9, 0))
COMMON = "the common Hopper tiles, measured on an H200"
IN_PART = "the common Hopper tiles, in part measured on an H200"
PORTABLE = "the common ones of portable kernels, most of which were not measured"


@pytest.fixture(autouse=True)
def _no_user_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ATTNLIB_TUNING", raising=False)
    tuning.clear_cache()
    yield
    tuning.clear_cache()


def _tiles(device: str | DeviceInfo, **changes: Any) -> list[str]:
    layer: dict[str, Any] = {
        "num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16,
        "block_size": 16, **changes,
    }  # fmt: skip
    lines = TritonBackend.explain_lines(AttentionSpec(**layer), resolve_device(device))
    return [line.removeprefix("tiles:   ") for line in lines if line.startswith("tiles:")]


LATENT = {"num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "use_mla": True}


@pytest.mark.parametrize(
    ("changes", "tiles"),
    [
        ({}, COMMON),
        ({"head_size": 64, "has_sink": True}, COMMON),
        ({"head_size": 112}, COMMON),
        ({"attn_type": "encoder_only"}, COMMON),
        ({"kv_cache_dtype": "fp8_e5m2"}, IN_PART),
        ({"kv_cache_dtype": "int4_per_group"}, COMMON),
        ({"head_size": 512}, "the common Hopper tiles, not measured for this head size"),
        ({"block_size": 24}, PORTABLE),
        ({"dtype": torch.float32}, PORTABLE),
        (LATENT, "the common Hopper tiles, chosen on an H200"),
        ({"batch_invariant": True}, "the common Hopper tiles, chosen on an H200"),
        ({"key_selection": KeySelection(max_blocks=16, block_size=128, scope="kv_head")}, PORTABLE),
    ],
)
@pytest.mark.parametrize("device", ["sm_90", "NVIDIA H100 PCIe", "H200"])
def test_common_tiles_on_hopper(device: str, changes: dict[str, Any], tiles: str) -> None:
    """On every Hopper GPU, measured or not: which tiles apply, and where they were measured."""
    assert _tiles(device, **changes) == [tiles]


@pytest.mark.parametrize("device", ["sm_80", "B200", "cpu", DeviceInfo("cuda", is_rocm=True)])
def test_other_devices_have_no_line(device: str | DeviceInfo) -> None:
    assert _tiles(device) == []


def test_the_chip_of_shipped_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables without tiles, which hold rankings only, are not named."""
    table = Tuning("a.json", H100.name, {}, {"triton": [{}]})
    monkeypatch.setattr(explain_tiles, "shipped_tuning", lambda device: table)
    assert _tiles(H100) == [f"those measured on the NVIDIA H100 80GB HBM3, else {COMMON}"]
    nearest = f"those measured on the {H100.name}, the nearest chip with a table, else {COMMON}"
    assert _tiles("NVIDIA H100 PCIe") == [nearest]
    other = DeviceInfo(type="cuda", name=H100.name, capability=(8, 0))
    assert _tiles(other) == [f"those measured on the {H100.name}, else the common ones"]
    empty = Tuning("b.json", H100.name)
    monkeypatch.setattr(explain_tiles, "shipped_tuning", lambda device: empty)
    assert _tiles(H100) == [COMMON]


def test_the_table_of_the_user_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Tuning("/tuning/mine.json", H100.name, {}, {"triton": [{}]})
    monkeypatch.setattr(explain_tiles, "tuning_for", lambda device: mine)
    assert _tiles(H100) == [f"those of /tuning/mine.json, else {COMMON}"]
