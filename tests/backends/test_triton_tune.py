"""Tuning of the triton backend: candidate tiles, table lines, and use of the tiles in a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib.backends.triton import tune
from attnlib.backends.triton.tile_candidates import tile_candidates
from attnlib.backends.triton.tile_groups import TileGroup, tile_group
from attnlib.backends.triton.tune import TritonTuner
from attnlib.bench.case_text import parse_case
from attnlib.device import DeviceInfo
from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.ops.triton.heuristics.choose_tiles import (
    TileRequest,
    choose_decode_tile,
    choose_latent_tile,
)
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of
from attnlib.ops.triton.heuristics.hopper_decode_tiles import (
    DecodeTile,
    choose_hopper_decode_tile,
    decode_shared_bytes,
)
from attnlib.ops.triton.heuristics.hopper_tiles import SHARED_MEMORY, HopperTile, choose_hopper_tile
from attnlib.ops.triton.heuristics.hopper_tiles import shared_bytes as hopper_bytes
from attnlib.ops.triton.heuristics.tile_table import TileTable, parse_table
from attnlib.ops.triton.heuristics.tiles import (
    Tile,
    shared_bytes,
)
from attnlib.tuning.document import merged
from attnlib.tuning.measure import Trial, best_parameters, measure_operation
from attnlib.tuning.table import Tuning
from attnlib.tuning.tuner import Best

KB = 1024
H200 = DeviceLimits(132, 227 * KB, 228 * KB, (9, 0), True)
L4 = DeviceLimits(58, 99 * KB, 100 * KB, (8, 9), True)
H200_INFO = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DECODE_LINE = {
    "op": "decode",
    "tile": {"block_m": 16, "block_n": 128, "num_warps": 4, "num_stages": 2},
    "provenance": "now",
}


def _operations(text: str, limits: DeviceLimits) -> list[str]:
    case = parse_case(text)
    return [op for op in TritonTuner.operations if tile_group(case, op, limits) is not None]


def _group(text: str, op: str, limits: DeviceLimits = H200) -> TileGroup:
    group = tile_group(parse_case(text), op, limits)
    assert group is not None
    return group


def _table(lines: list[dict[str, Any]]) -> TileTable:
    document = {"schema": 1, "chip": "x", "provenance": {"now": ""}, "tiles": lines}
    return parse_table(document, "x")


def _lines(best: dict[Any, Best]) -> list[dict[str, Any]]:
    return TritonTuner(HERE).table_lines(best, "now")


def test_operations_are_those_that_support_the_case() -> None:
    assert _operations("8q1s8k", H200) == ["decode", "hopper_decode"]
    assert _operations("8q8s8k@heads=64/4", H200) == _operations("8q1s8k", L4) == ["decode"]
    assert _operations("q2k", H200) == ["prefill", "hopper_prefill"]
    assert _operations("4q1s2k_q2k", H200) == []
    assert _operations("q2k", L4) == _operations("q2k@dtype=float32", H200) == ["prefill"]


LATENTS = "8q1s8k@heads=16/1,d=576,dv=512,mla,page=64"


@pytest.mark.parametrize("limits", [H200, L4], ids=["H200", "L4"])
def test_decodes_and_prefills_over_latents_share_an_operation(limits: DeviceLimits) -> None:
    """P6, P10: their candidates fit, the current tile is the first one."""
    prefill = LATENTS.replace("8q1s8k", "q2k").replace("16/1", "128/1")
    for text, rows in ((LATENTS, [16, 16]), (prefill, [64, None])):
        assert _operations(text, limits) == ["latent"]
        group = _group(text, "latent", limits)
        assert group.head_size == 512 and group.conditions()["rows"] == rows
        tiles = [Tile(**tile) for tile in tile_candidates(parse_case(text), "latent", limits)]
        need = [shared_bytes(tile, 576, 512, 2, 2, limits.products, latent=True) for tile in tiles]
        assert len(tiles) >= 3 and max(need) <= limits.shared_memory
        in_place = limits is H200
        most = 128 if rows == [64, None] else 16
        current = choose_latent_tile(
            TileRequest((576, 512), (2, 2), most, limits.shared_memory, limits.products),
            in_place=in_place,
        )
        assert tiles[0] == current


@pytest.mark.parametrize("limits", [H200, L4], ids=["H200", "L4"])
@pytest.mark.parametrize(
    "text",
    [
        "8q1s8k",
        "16q4s4k",
        "q16k",
        "8q1s8k@d=256,heads=16/8",
        "q2k@d=256,heads=16/8",
        "8q1s8k@kv=fp8_e4m3",
        "q512@d=64,dtype=float32",
    ],
)
def test_candidates_fit_the_chip(text: str, limits: DeviceLimits) -> None:
    """P6: no candidate exceeds the shared memory of the chip."""
    case = parse_case(text)
    tiles = [Tile(**tile) for tile in tile_candidates(case, case.kind, limits)]
    sizes = (case.head_size, case.head_size)
    element_bytes = (case.spec.dtype.itemsize, case.spec.kv_dtype.itemsize)
    need = [shared_bytes(tile, *sizes, *element_bytes, limits.products) for tile in tiles]
    assert len(tiles) >= 3 and len(set(tiles)) == len(tiles)
    assert max(need) <= limits.shared_memory


def test_the_current_tile_is_the_first_candidate() -> None:
    current = choose_decode_tile(TileRequest((128, 128), (2, 2), 4, 227 * KB, "async"))
    assert tile_candidates(parse_case("8q1s8k"), "decode", H200)[0] == vars(current)


def test_hopper_decode_candidates_start_with_the_shipped_tile_and_fit() -> None:
    tiles = tile_candidates(parse_case("8q1s8k"), "hopper_decode", H200)
    assert tiles[0] == vars(choose_hopper_decode_tile(128, 128)) and len(tiles) > 4
    assert all(decode_shared_bytes(DecodeTile(**tile), 128, 128) <= SHARED_MEMORY for tile in tiles)
    group = _group("8q1s8k", "hopper_decode")
    assert (group.head_size, group.work, group.block_size) == (128, 4096, None)
    little_work = tile_candidates(parse_case("q1s1k"), "hopper_decode", H200)[0]
    assert little_work == vars(choose_hopper_decode_tile(128, 128, keys_per_sm=64)) != tiles[0]
    assert _group("q1s1k", "hopper_decode") == replace(group, work=64)


@pytest.mark.parametrize("text", ["8q1s8k", "8q8s8k", "256q1s1k", "q2k", "q2k@d=256,heads=16/8"])
def test_float8_candidates_of_the_hopper_kernels(text: str) -> None:
    """They fit, and their lines name the format and the rows."""
    case = parse_case(f"{text}{',' if '@' in text else '@'}kv=fp8_e4m3")
    op, sizes = f"hopper_{case.kind}", (case.head_size, case.head_size)
    tiles = tile_candidates(case, op, H200)
    assert len({tuple(tile.items()) for tile in tiles}) == len(tiles)
    for tile in tiles:
        if case.kind == "decode":
            assert decode_shared_bytes(DecodeTile(**tile), *sizes, 1) <= SHARED_MEMORY
        else:
            assert HopperTile(**tile).byte_stages > 0
            assert hopper_bytes(HopperTile(**tile), *sizes) <= SHARED_MEMORY
    line = _group(case.name, op).conditions()
    assert line["elements"] == ["fp8"]
    if case.kind == "decode":
        assert line["rows"] == [16, max(16, 4 * case.batch.max_query_len)]


@pytest.mark.parametrize(
    ("cache", "elements"),
    [
        ("int8_per_token_head", "int8"),
        ("fp8_per_token_head", "int8"),
        ("int4_per_group", "int4"),
        ("int8_per_token_head,v=int4_per_group", "int8-int4"),
        ("int8_per_token_head,v=nvfp4", "int8-fp4"),
        ("nvfp4", "fp4"),
        ("mxfp4", "fp4"),
    ],
)
def test_lines_over_pages_with_scales_name_the_size_of_elements(cache: str, elements: str) -> None:
    """As `choose_hopper_decode_tile` looks them up."""
    case = parse_case(f"32q1s4k@kv={cache}")
    tiles = tile_candidates(case, "hopper_decode", H200)
    keys, _, values = cache.partition(",v=")
    options: Any = {"stored": PAGE_FORMATS[keys]}
    options["values"] = PAGE_FORMATS[values] if values else None
    options |= {"rows": 4, "one_warp": True}
    current = choose_hopper_decode_tile(128, 128, keys_per_sm=1 << 14, pairs_per_sm=2, **options)
    assert tiles[0] == vars(current) and len(tiles) > 4
    line = _group(f"32q1s4k@kv={cache}", "hopper_decode").conditions()
    assert line["elements"] == [elements] and line["rows"] == [16, 16]
    tile = DecodeTile(32, 5, warps=4 if elements == "fp4" else 0)
    table = _table([{**line, "tile": vars(tile), "provenance": "now"}])
    assert choose_hopper_decode_tile(128, 128, tuned=table, **options) == tile


def test_hopper_prefills_are_grouped_by_window_and_block_size() -> None:
    full, narrow = "q8k@d=64,heads=64/8", "q8k@d=64,heads=64/8,window=128,sinks"
    group = _group(full, "hopper_prefill")
    assert (group.block_size, group.visible) == (16, (1025, None))
    assert _group(narrow, "hopper_prefill") == replace(group, visible=(1, 256))
    assert _group(f"{full},page=128", "hopper_prefill") == replace(group, block_size=128)
    assert _group(full, "prefill").visible is None
    for text, window in ((full, None), (narrow, 128)):
        tiles = tile_candidates(parse_case(text), "hopper_prefill", H200)
        current = choose_hopper_tile(64, 64, block_size=16, visible=window)
        assert tiles[0] == vars(current)
        assert ({tile["block_n"] for tile in tiles} == {32, 64, 128}) == (window is not None)


def test_lines_of_hopper_prefills_match_only_what_was_measured() -> None:
    tile = {"block_n": 64, "stages": 3, "persistent": True, "q_stages": 2}
    trials = []
    for text in ("q8k@d=64,heads=64/8", "q8k@d=64,heads=64/8,window=128,sinks"):
        group = _group(text, "hopper_prefill")
        current = tile_candidates(parse_case(text), "hopper_prefill", H200)[0]
        trials += [Trial(group, text, current, 10.0, True), Trial(group, text, tile, 9.0, False)]
    full, narrow = _lines(best_parameters(trials))
    assert (full["block_size"], full["visible"]) == ([16, 16], [1025, None])
    assert narrow["visible"] == [1, 256]
    for line, matching, others in (
        (full, (None, 4096), (128, 300)),
        (narrow, (64, 128), (None, 300)),
    ):
        table = _table([line])
        for visible in (*matching, *others):
            shipped = choose_hopper_tile(64, 64, block_size=16, visible=visible)
            chosen = choose_hopper_tile(64, 64, block_size=16, visible=visible, tuned=table)
            expected = HopperTile(**tile) if visible in matching else shipped
            assert chosen == expected, (line, visible)
    document = merged(
        {"provenance": {}, "parameters": {"triton": [full, narrow]}, "backends": []},
        "now",
        {},
        {"triton": [{**narrow, "tile": {}}]},
        line_keys={"triton": TritonTuner(HERE).line_key},
    )
    found = [line["visible"] for line in document["parameters"]["triton"]]
    assert found == [[1, 256], [1025, None]], "a line of another class of windows stays"


def _trials(times: dict[tuple[str, int], list[float | None]]) -> list[Trial]:
    """(case, work) -> times of tiles with 64, 32 and 128 keys; the first one is current."""
    found = []
    for (case, work), values in times.items():
        group = TileGroup("decode", "async", "16-bit", 128, 16, None, work)
        for number, (block_n, us) in enumerate(zip((64, 32, 128), values, strict=True)):
            tile = {"block_m": 16, "block_n": block_n, "num_warps": 4, "num_stages": 2}
            found.append(Trial(group, case, tile, us, number == 0, "" if us else "wrong"))
    return found


def test_one_tile_for_all_work_is_one_line() -> None:
    times: dict[tuple[str, int], list[float | None]] = {
        ("a", 1024): [10.0, 9.0, 12.0],
        ("b", 4096): [20.0, 18.0, 25.0],
    }
    (line,) = _lines(best_parameters(_trials(times)))
    assert "keys_per_sm" not in line and line["tile"]["block_n"] == 32
    assert line["measured"] == {
        "a": {"us": 9.0, "before_us": 10.0},
        "b": {"us": 18.0, "before_us": 20.0},
    }
    assert line["rows"] == [16, 16] and line["head_size"] == [128, 128]


def test_lines_that_differ_by_work_cover_all_of_it() -> None:
    times: dict[tuple[str, int], list[float | None]] = {
        ("big", 65536): [100.0, 99.5, 90.0],
        ("small", 1024): [10.0, 9.0, 12.0],
        ("mid", 4096): [20.0, 18.0, 25.0],
    }
    lines = _lines(best_parameters(_trials(times)))
    assert [(line["keys_per_sm"], line["tile"]["block_n"]) for line in lines] == [
        ([0, 4096], 32),
        ([4097, None], 128),
    ]
    arguments: Any = ((128, 128), (2, 2), 4, 227 * KB, "async")
    chosen = choose_decode_tile(TileRequest(*arguments, tuned=_table(lines)), keys_per_sm=1 << 20)
    assert chosen.block_n == 128


def _write_and_use(monkeypatch: pytest.MonkeyPatch, *lines: dict[str, Any]) -> TileTable | None:
    """What `use_tuned_tiles` selects for a GPU whose table has these lines."""
    tuning = Tuning("mine.json", "NVIDIA H200", {"now": ""}, {"triton": list(lines)})
    selected: dict[int, TileTable | None] = {}
    monkeypatch.setattr(tune, "device_info", lambda kind, index: H200_INFO)
    monkeypatch.setattr(tune, "tuning_for", lambda info: tuning if info is H200_INFO else None)
    monkeypatch.setattr(tune, "set_tuned_tiles", selected.__setitem__)
    tune.use_tuned_tiles(torch.device("cuda", 3))
    assert list(selected) == [3]
    return selected[3]


def test_kernels_use_the_tiles_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _write_and_use(monkeypatch, DECODE_LINE)
    chosen = choose_decode_tile(TileRequest((128, 128), (2, 2), 4, 227 * KB, "async", tuned=table))
    assert chosen == Tile(16, 128, 4, 2)
    assert tune.use_tuned_tiles(torch.device("cpu")) is None


def test_tiles_of_the_user_precede_those_of_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of `attnlib tune` may have no line for a problem that the shipped table has."""
    shipped = Tuning(
        "shipped.json",
        "NVIDIA H200",
        {"now": ""},
        {
            "triton": [
                {**DECODE_LINE, "tile": DECODE_LINE["tile"] | {"num_stages": 3}},
                {"op": "hopper_decode", "tile": {"block_n": 32, "stages": 7}, "provenance": "now"},
            ]
        },
    )
    monkeypatch.setattr(tune, "shipped_tuning", lambda info: shipped)
    table = _write_and_use(monkeypatch, DECODE_LINE)
    again = _write_and_use(monkeypatch, DECODE_LINE)
    assert table is not None and again is not None and table.entries == again.entries
    chosen = choose_decode_tile(TileRequest((128, 128), (2, 2), 4, 227 * KB, "async", tuned=table))
    assert chosen == Tile(16, 128, 4, 2)
    assert choose_hopper_decode_tile(128, 128, tuned=table) == DecodeTile(32, 7)
    alone = _write_and_use(monkeypatch)
    assert alone is not None
    chosen = choose_decode_tile(TileRequest((128, 128), (2, 2), 4, 227 * KB, "async", tuned=alone))
    assert chosen == Tile(16, 128, 4, 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"op": "decode"}, r"mine.json, tiles\[0\]: 'tile' is missing"),
        (
            {
                "op": "hopper_prefill",
                "tile": {"block_n": 64, "stages": 2, "hue": 1},
                "provenance": "now",
            },
            r"mine.json, tiles\[0\]: .*'hue'",
        ),
    ],
    ids=["no tile", "unknown field"],
)
def test_lines_that_are_not_tiles_are_one_warning(
    line: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match=message + r"[\s\S]*ATTNLIB_TUNING=off ignores"):
        assert _write_and_use(monkeypatch, line) is None


@pytest.mark.slow
def test_tiles_are_selected_while_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs with each candidate, and a wrong output gets no time."""
    from attnlib.ops.triton import decode_schedule
    from attnlib.ops.triton import paged_decode as module

    case = parse_case("q1s20@heads=2/1,d=16,dtype=float32")
    seen: list[int] = []
    choose, attend = decode_schedule.decode_tile, module.paged_decode

    def recorded(*args: Any, **options: Any) -> Tile:
        seen.append(choose(*args, **options).block_n)
        return choose(*args, **options)

    def wrong_for_128(query: torch.Tensor, *args: Any, out: torch.Tensor, **options: Any) -> None:
        attend(query, *args, out=out, **options)
        tuned = limits_of(query).tuned
        if tuned is not None and dict(tuned.entries[0].tile)["block_n"] == 128:
            out.add_(0.5)

    monkeypatch.setattr(decode_schedule, "decode_tile", recorded)
    monkeypatch.setattr(module, "paged_decode", wrong_for_128)
    trials = measure_operation(TritonTuner(HERE), case, "decode", HERE, quick=True)
    tried = {trial.parameters["block_n"]: trial for trial in trials}
    assert {32, 64, 128} <= set(tried) == set(seen) and len(trials) <= 5
    assert tried[128].us is None and "over budget" in tried[128].reason
    assert all(trial.us for block_n, trial in tried.items() if block_n != 128)
    assert limits_of(torch.empty(0, device=HERE)).tuned is None, "the previous table is restored"


def test_the_path_of_a_table_is_the_source_of_its_messages(tmp_path: Path) -> None:
    table = tune.parse_tiles(Tuning(str(tmp_path / "t.json"), "x", {"now": ""}, {}))
    assert table.name == str(tmp_path / "t.json") and table.entries == ()
