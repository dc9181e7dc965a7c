"""Shipped rankings equal the committed result; other chips use those of the nearest one."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnlib
from attnlib import tuning
from attnlib.backends.builtin import BUILTIN_BACKENDS
from attnlib.backends.triton.spec_shape import layer_shape
from attnlib.bench.results import Row, case_of_row, read_document
from attnlib.device import DeviceInfo
from attnlib.ops.triton.hopper.common_reasons import CallFeatures
from attnlib.ops.triton.hopper.support import (
    decode_unsupported_reasons,
    prefill_unsupported_reasons,
)
from attnlib.selection.decision import auto_order
from attnlib.selection.registry import registrations
from attnlib.selection.selector import measured_ranking
from attnlib.tuning import rankings
from attnlib.tuning.rankings import shipped_ranking, shipped_rankings
from attnlib.tuning.table import Tuning
from benchmarks.ship_rankings import RESULTS, SOURCES, TABLES, TILES, table_of, text_of

H200 = DeviceInfo(type="cuda", name="NVIDIA H200", capability=(9, 0))
LLAMA = attnlib.AttentionSpec(
    num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, block_size=16
)
FLOAT8 = LLAMA.replace(kv_cache_dtype="fp8_e4m3")
A100 = DeviceInfo(type="cuda", name="NVIDIA A100-SXM4-80GB", capability=(8, 0))
NOISE = 1.02
LED = {"gap-verify-128x2k-2tokens-32heads": 1.023}
"""Rows that a backend leads by more, which loses the others of their class: FlashMLA."""


@pytest.fixture(autouse=True)
def _no_user_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ATTNLIB_TUNING", raising=False)
    tuning.clear_cache()
    yield
    tuning.clear_cache()


@pytest.mark.parametrize("name", SOURCES)
def test_tables_equal_the_committed_results(name: str) -> None:
    """`python benchmarks/ship_rankings.py` writes them."""
    text = (TABLES / f"{name}.json").read_text(encoding="utf-8")
    assert text == text_of(table_of(SOURCES[name], TILES.get(name)))


def test_every_table_has_committed_results() -> None:
    assert {path.stem for path in TABLES.glob("*.json")} == set(SOURCES)


@pytest.mark.parametrize("source", [source for each in SOURCES.values() for source in each])
def test_auto_takes_the_fastest_backend_on_each_row(source: str) -> None:
    """Speed rule 6: the first installed backend in auto's order is the fastest correct one, or
    within noise. Rows of one backend compare nothing.
    """
    rows: dict[str, list[Row]] = {}
    document = read_document(RESULTS / source)
    name = document.runs[0].provenance["gpu"]
    device = DeviceInfo(type="cuda", name=name, capability=(9, 0))
    for row in document.rows:
        if row.backend in BUILTIN_BACKENDS and row.status == "ok" and row.us and row.checked:
            rows.setdefault(row.case, []).append(row)
    compared = {case: members for case, members in rows.items() if len(members) > 1}
    assert len(compared) >= (30 if source.endswith("/bench.json") else 5)
    for case, members in compared.items():
        ranking = shipped_ranking(case_of_row(members[0]).spec, device)
        assert ranking is not None, case
        times = {row.backend: float(row.us or 0) for row in members}
        taken = next(
            entry.name
            for entry in auto_order(registrations().values(), device, ranking.order)
            if entry.name in times
        )
        assert times[taken] <= LED.get(case, NOISE) * min(times.values()), (case, times, taken)


def test_rankings_apply_to_every_degree_of_tensor_parallelism() -> None:
    for heads, kv_heads in ((32, 8), (8, 2), (4, 1), (64, 16)):
        ranking = measured_ranking(LLAMA.replace(num_heads=heads, num_kv_heads=kv_heads), H200)
        assert ranking is not None and ranking.order[0] == "triton"
        assert "attnlib's own table of the NVIDIA H200" in str(ranking.message("triton"))


@pytest.mark.parametrize(
    ("spec", "device"),
    [
        (LLAMA.replace(head_size=96, has_alibi=True), H200),
        (LLAMA.replace(dtype=torch.float32), H200),
        # The portable kernels serve them, which no result of these chips measures.
        (LLAMA.replace(head_size=32), H200),
        (LLAMA.replace(head_size=100), H200),
        (LLAMA.replace(head_size=64, block_size=24), H200),
        (FLOAT8.replace(head_size=32), H200),
        (LLAMA.replace(block_size=4), H200),
        (FLOAT8.replace(block_size=8), H200),
        (FLOAT8.replace(has_alibi=True), H200),
        (FLOAT8.replace(dtype=torch.float16), H200),
        (FLOAT8.replace(num_kv_heads=1, head_size=576, head_size_v=512, use_mla=True), H200),
        (LLAMA.replace(kv_cache_dtype="fp8_per_token_head"), H200),
        (LLAMA, A100),
        (FLOAT8, A100),
        (LLAMA, DeviceInfo("cuda", 0, (9, 0), is_hypothetical=True)),
        (LLAMA, DeviceInfo(type="cpu")),
    ],
)
def test_layers_and_chips_that_were_not_measured_have_no_ranking(
    spec: attnlib.AttentionSpec, device: DeviceInfo
) -> None:
    """Another layer class, another architecture, a hypothetical chip without a name, a CPU."""
    assert measured_ranking(spec, device) is None


def test_a_hypothetical_chip_uses_the_tables_of_its_name() -> None:
    """`attnlib explain --device H200` on a computer without a GPU."""
    assert measured_ranking(LLAMA, dataclasses.replace(H200, is_hypothetical=True)) == (
        measured_ranking(LLAMA, H200)
    )


@pytest.mark.parametrize("chip", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_float8_caches_have_their_own_rankings(chip: str) -> None:
    """Without one, the priority puts flashinfer first, which is slower on every measured row."""
    gpu = dataclasses.replace(H200, name=chip)
    for spec in (FLOAT8, FLOAT8.replace(kv_scale_kind="head"), FLOAT8.replace(num_kv_heads=32)):
        ranking = measured_ranking(spec, gpu)
        assert ranking is not None and ranking.order == ("triton", "flashinfer")
        assert (ranking.kv_cache_dtype, ranking.classes) == ("", 0)
        order = [entry.name for entry in auto_order(registrations().values(), gpu, ranking.order)]
        assert order.index("triton") < order.index("flashinfer")


def test_e5m2_caches_use_the_ranking_of_e4m3_and_say_so() -> None:
    """Equal bytes and equal kernels; the nearest block size is named, too."""
    for size, blocks in ((16, ""), (128, " and blocks of 16")):
        e5m2 = FLOAT8.replace(kv_cache_dtype="fp8_e5m2", block_size=size)
        ranking, own = measured_ranking(e5m2, H200), measured_ranking(FLOAT8, H200)
        assert ranking is not None and own is not None and ranking.order == own.order
        means = f"with float8_e4m3fn caches{blocks}"
        assert f"for such layers {means} on this chip" in str(ranking.message("triton"))
        assert str(ranking.message("flashinfer")).endswith(f"of triton {means}")


@pytest.mark.parametrize(
    "changes",
    [
        {"head_size": 64},
        {"num_heads": 64},
        {"sliding_window": 4096, "kv_cache_dtype": "fp8_e5m2"},
        {"head_size": 256, "num_kv_heads": 16, "logits_soft_cap": 50.0},
        {"head_size": 64, "has_sink": True, "block_size": 64},
    ],
)
def test_other_float8_layers_use_the_order_of_all_measured_ones(changes: dict[str, Any]) -> None:
    """One backend is the fastest in each measured class; explain says that this is another one."""
    ranking = measured_ranking(FLOAT8.replace(**changes), H200)
    measured = [
        found
        for found in shipped_rankings("NVIDIA H200")
        if str(found.layer["kv_cache_dtype"]).startswith("float8")
    ]
    assert ranking is not None and ranking.order[0] == "triton"
    assert ranking.classes == len(measured) >= 2
    message = str(ranking.message("triton"))
    assert (
        f"for all {len(measured)} measured classes of layers with float8_e4m3fn caches" in message
    )
    assert "layers like this one were not measured" in message
    assert str(ranking.message("flashinfer")).startswith("slower than triton for all")
    far = dataclasses.replace(H200, name="NVIDIA GH200 480GB")
    other = measured_ranking(FLOAT8.replace(**changes), far)
    assert other is not None and "on the NVIDIA H200, the nearest" in str(other.message("triton"))


@pytest.mark.parametrize(
    "changes",
    [
        {"head_size": 64},
        {"head_size": 96},
        {"num_kv_heads": 32, "head_size": 64, "sliding_window": 4096},
        {"dtype": torch.float16},
        {"head_size": 256, "num_kv_heads": 16, "logits_soft_cap": 50.0, "block_size": 64},
    ],
)
def test_other_layers_use_the_order_of_all_measured_ones(changes: dict[str, Any]) -> None:
    """Llama 3.2 1B has 4 heads of 64 for each KV head, which no result has: by priority it took
    flash_attn where that was installed. An H100, whose classes differ, takes those of the H200."""
    spec = LLAMA.replace(**changes)
    ranking = measured_ranking(spec, H200)
    assert ranking is not None and ranking.order[0] == "triton"
    assert ranking.classes >= 15 or ranking.block_size
    if ranking.classes:
        assert f"all {ranking.classes} measured classes of layers with bfloat16 caches" in str(
            ranking.message("triton")
        )
    order = [entry.name for entry in auto_order(registrations().values(), H200, ranking.order)]
    assert order[0] == "triton"
    other = measured_ranking(spec, dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3"))
    assert other is not None and other.order[0] == "triton"
    if other.classes:  # the H100 has measured such layers, too
        assert "the NVIDIA H200, the nearest chip with such an order" in str(
            other.message("triton")
        )


@pytest.mark.parametrize("heads", [8, 16, 20, 64, 128])
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_latents_use_the_order_of_measured_latents(
    heads: int, block_size: int, dtype: torch.dtype
) -> None:
    """Inside vLLM, whose FlashAttention 3 reads latents, attnlib took `flash_attn` by priority."""
    spec = LLAMA.replace(
        num_heads=heads, num_kv_heads=1, head_size=576, head_size_v=512, use_mla=True,
        block_size=block_size, dtype=dtype,
    )  # fmt: skip
    for name in (H200.name, "NVIDIA H100 80GB HBM3"):
        ranking = measured_ranking(spec, dataclasses.replace(H200, name=name))
        assert ranking is not None and ranking.order[0] == "triton"
    assert measured_ranking(spec.replace(head_size=320, head_size_v=256), H200) is None


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_the_order_of_all_measured_ones_is_that_of_layers_with_hopper_kernels(cache: str) -> None:
    """The portable kernels serve others: blocks of 512, 96 query heads, float8 heads of 72."""
    chip, found = SimpleNamespace(capability=(9, 0), num_sms=132), set()
    for size, group, block_size in itertools.product(
        (56, 64, 72, 96, 128, 136, 160, 256, 264), (1, 12, 24, 48, 96), (8, 16, 24, 256, 512)
    ):
        spec = LLAMA.replace(
            num_heads=group, num_kv_heads=1, head_size=size, head_size_v=size,
            block_size=block_size, kv_cache_dtype=cache,
        )  # fmt: skip
        ranking = measured_ranking(spec, H200)
        shape, usual = layer_shape(spec), CallFeatures()
        served = not (
            prefill_unsupported_reasons(shape, usual, chip)
            or decode_unsupported_reasons(shape, usual, chip)
        )
        taken = ranking is not None and ranking.classes > 0
        assert not taken or served, (spec, ranking)
        found.add((taken, served))
    assert {(True, True), (False, False)} <= found


def test_float8_layers_without_a_common_fastest_backend_have_no_ranking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the priority decides."""
    first, second = (
        next(r for r in shipped_rankings("NVIDIA H200") if r.layer == tuning.layer_class(spec))
        for spec in (FLOAT8, FLOAT8.replace(num_kv_heads=32))
    )
    other = dataclasses.replace(second, order=second.order[::-1])
    for both, classes in (((first, second), 2), ((first,), 1), ((first, other), None)):
        monkeypatch.setattr(
            rankings, "shipped_tunings",
            lambda both=both: (((9, 0), Tuning("a", "NVIDIA H200", rankings=both)),),
        )  # fmt: skip
        found = measured_ranking(FLOAT8.replace(head_size=64), H200)
        assert (None if found is None else found.classes) == classes
        if classes == 1:
            assert found and "for the one measured class of layers" in str(found.message("triton"))


def test_a_chip_without_measurements_uses_the_nearest_one_and_says_so() -> None:
    """A GPU of the same compute capability; measurements precede priorities."""
    other = dataclasses.replace(H200, name="NVIDIA GH200 480GB")
    ranking = measured_ranking(LLAMA, other)
    own = measured_ranking(LLAMA, H200)
    assert ranking is not None and own is not None and ranking.order == own.order
    assert own.chip == "" and "on this chip: attnlib's own table" in str(own.message("triton"))
    assert "on the NVIDIA H200, the nearest chip with a measurement" in str(
        ranking.message("triton")
    )
    assert str(ranking.message("flash_attn")).endswith("the time of triton on the NVIDIA H200")


@pytest.mark.parametrize(("size", "measured"), [(32, 16), (64, 128), (256, 128), (48, 128)])
def test_block_sizes_without_measurements_use_the_nearest_one_and_say_so(
    size: int, measured: int
) -> None:
    """Blocks of 64 are the pages of SGLang on Hopper; smaller blocks than 16 have other kernels."""
    ranking = measured_ranking(LLAMA.replace(block_size=size), H200)
    exact = measured_ranking(LLAMA.replace(block_size=measured), H200)
    assert ranking is not None and exact is not None and ranking.order == exact.order
    assert ranking.block_size == measured and exact.block_size == 0
    assert f"such layers with blocks of {measured} on this chip" in str(ranking.message("triton"))
    assert f"of triton with blocks of {measured}" in str(ranking.message("flash_attn"))
    assert "blocks of" not in str(exact.message("triton"))


def test_tiles_are_those_of_the_nearest_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    def chip(name: str, capability: tuple[int, int] = (9, 0)) -> str | None:
        info = DeviceInfo(type="cuda", name=name, capability=capability)
        found = rankings.shipped_tuning(info)
        return None if found is None else found.chip

    assert chip("NVIDIA H200") == chip("NVIDIA GH200 480GB") == "NVIDIA H200"
    assert chip("NVIDIA H100 80GB HBM3") == chip("NVIDIA H100 PCIe") == "NVIDIA H100 80GB HBM3"
    assert chip("NVIDIA A100-SXM4-80GB", (8, 0)) is None
    assert rankings.shipped_tuning(DeviceInfo(type="cpu")) is None
    monkeypatch.setenv("ATTNLIB_TUNING", "off")
    assert chip("NVIDIA H200") is None


def test_the_nearest_chip_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model counts, not the memory after it; other compute capabilities never count."""
    tables = (
        ((9, 0), Tuning("a", "NVIDIA H100 80GB HBM3")),
        ((9, 0), Tuning("b", "NVIDIA H200")),
        ((10, 0), Tuning("c", "NVIDIA H100 PCIe")),
    )
    monkeypatch.setattr(rankings, "shipped_tunings", lambda: tables)
    rankings._nearest_chips.cache_clear()
    nearest = {
        name: rankings._nearest_chips(name, (9, 0))[0]
        for name in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA H200")
    }
    rankings._nearest_chips.cache_clear()
    assert nearest == {
        "NVIDIA H100 PCIe": "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 NVL": "NVIDIA H100 80GB HBM3",
        "NVIDIA H200 NVL": "NVIDIA H200",
        "NVIDIA H200": "NVIDIA H200",
    }
    assert rankings._nearest_chips("NVIDIA A100", (8, 0)) == ()


def test_the_table_of_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relative = {"flash_attn": 1.0, "triton": 1.2}
    line = {
        "layer": tuning.layer_class(LLAMA),
        "ranking": list(relative),
        "relative": relative,
        "provenance": "mine",
    }
    own = tmp_path / "own.json"
    own.write_text(
        json.dumps(
            {
                "about": "",
                "schema": 1,
                "chip": "NVIDIA H200",
                "provenance": {"mine": "by hand"},
                "parameters": {},
                "backends": [line],
            }
        )
    )
    monkeypatch.setenv("ATTNLIB_TUNING", str(own))
    ranking = measured_ranking(LLAMA, H200)
    assert ranking is not None and ranking.order == ("flash_attn", "triton")
    other = measured_ranking(LLAMA.replace(block_size=128), H200)
    assert other is not None and other.order[0] == "triton", "what the user did not measure"
    monkeypatch.setenv("ATTNLIB_TUNING", "off")
    assert measured_ranking(LLAMA, H200) is None


def test_every_line_has_its_provenance() -> None:
    assert shipped_rankings("NVIDIA H200")
    for path in TABLES.glob("*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        for text in data["provenance"].values():
            for word in (data["chip"], "driver", "torch", "triton", "commit", "attnlib bench"):
                assert word in text
        assert all(line["provenance"] in data["provenance"] for line in data["backends"])
        assert all(line["microseconds"] for line in data["backends"])


@pytest.mark.parametrize("changes", [{}, {"conv_channels": 4096, "conv_width": 4}])
def test_state_layers_are_ranked(changes: dict[str, Any]) -> None:
    """Those that were measured, with any convolution and on any number of ranks; not others."""
    spec = attnlib.StateSpec(
        num_heads=16, num_key_heads=8, key_size=128, value_size=128, dtype=torch.bfloat16
    ).replace(**changes)
    ranking = measured_ranking(spec, H200)
    assert ranking is not None and ranking.order == ("triton", "fla")
    assert "measured at 15.86 x the time of triton" in str(ranking.message("fla"))
    for other in ({"max_rollback": 3}, {"decay": "channel"}, {"batch_invariant": True}):
        assert measured_ranking(spec.replace(**other), H200) is None
    window = attnlib.StateSpec(conv_channels=64, conv_width=3, dtype=torch.bfloat16)
    assert measured_ranking(window, H200) is None
