"""`attnlib tune`: plans, candidates, what becomes of trials, and the whole command on a CPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib import tuning
from attnlib.bench.case import BenchCase, parse_case
from attnlib.bench.results import Row
from attnlib.cli import main
from attnlib.cli.tune.backends import rank_rows
from attnlib.cli.tune.candidates import Group, candidates, group_of, operations
from attnlib.cli.tune.document import merged, read_document, write_document
from attnlib.cli.tune.main import parser
from attnlib.cli.tune.plan import plan_cases
from attnlib.cli.tune.tiles import Trial, best_entries, measure_tiles
from attnlib.errors import ContractError
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of
from attnlib.ops.triton.heuristics.hopper_tiles import (
    SHARED_MEMORY,
    DecodeTile,
    HopperTile,
    choose_hopper_decode_tile,
    choose_hopper_tile,
    decode_shared_bytes,
)
from attnlib.ops.triton.heuristics.tile_table import parse_table
from attnlib.ops.triton.heuristics.tiles import Tile, choose_decode_tile, shared_bytes

KB = 1024
H200 = DeviceLimits(132, 227 * KB, 228 * KB, (9, 0), True)
L4 = DeviceLimits(58, 99 * KB, 100 * KB, (8, 9), True)
SMALL = ["--num-heads", "4", "--num-kv-heads", "2", "--head-size", "32", "--dtype", "float32"]


def _options(*words: str) -> argparse.Namespace:
    return parser().parse_args(list(words))


def test_plans_name_layers_by_flags_by_config_or_by_case(tmp_path: Path) -> None:
    cases, left_out = plan_cases(_options(*SMALL, "--shapes", "q1s64,2q8"), "cpu")
    assert [(case.name, str(case.batch), case.spec.head_size) for case in cases] == [
        ("q1s64@spec", "q1s64", 32),
        ("2q8@spec", "2q8", 32),
    ]
    assert not left_out
    assert [case.name for case in plan_cases(_options("cpu-decode-*"), "cpu")[0]] == [
        "cpu-decode-1x512",
        "cpu-decode-8x256",
        "cpu-decode-ragged",
    ]
    config = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "torch_dtype": "bfloat16",
        "model_type": "llama4",
    }
    config |= {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cases, left_out = plan_cases(_options("--config", str(tmp_path), "--quick"), "cuda")
    assert [case.name for case in cases] == ["8q1s8k@full_attention", "q4k@full_attention"]
    assert left_out == [
        "chunked_attention has attention_chunk_size=64, which no case can say: it keeps the shipped tiles and order"
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("q1s8", "--head-size", "32"), "cases name their layers themselves"),
        (("--shapes", "q1x8"), "does not parse"),
        (("--has-alibi",), "nothing can be measured: this layer has has_alibi=True"),
    ],
)
def test_plans_that_say_nothing_measurable_are_refused(words: tuple[str, ...], told: str) -> None:
    with pytest.raises(ContractError, match=told):
        plan_cases(_options(*words), "cpu")


def test_candidates_fit_the_chip_and_begin_with_the_tile_of_today() -> None:
    """P6: nothing is tried that the chip cannot hold."""
    for limits in (H200, L4):
        for text in (
            "8q1s8k",
            "16q4s4k",
            "q16k",
            "8q1s8k@d=256,heads=16/8",
            "q2k@d=256,heads=16/8",
            "8q1s8k@kv=fp8_e4m3",
            "q512@d=64,dtype=float32",
        ):
            case = parse_case(text)
            for op in operations(case, limits, ("decode", "prefill")):
                tried = [Tile(**tile) for tile in candidates(case, op, limits)]
                size = case.head_size
                need = [
                    shared_bytes(
                        tile,
                        size,
                        size,
                        case.spec.dtype.itemsize,
                        case.spec.kv_dtype.itemsize,
                        limits.products,
                    )
                    for tile in tried
                ]
                assert (
                    len(tried) >= 3
                    and len(set(tried)) == len(tried)
                    and max(need) <= limits.shared_memory
                ), (text, op)
                assert len(candidates(case, op, limits, quick=True)) <= 5
    today = choose_decode_tile(128, 128, 2, 2, 4, 227 * KB, "async")
    assert candidates(parse_case("8q1s8k"), "decode", H200)[0] == vars(today)


def test_hopper_decodes_try_the_shipped_tile_first_and_only_what_fits() -> None:
    tiles = candidates(parse_case("8q1s8k"), "hopper_decode", H200)
    assert tiles[0] == vars(choose_hopper_decode_tile(128, 128)) and len(tiles) > 4
    assert all(decode_shared_bytes(DecodeTile(**tile), 128, 128) <= SHARED_MEMORY for tile in tiles)
    group = group_of(parse_case("8q1s8k"), "hopper_decode", H200)
    assert (group.head_size, group.work, group.block_size) == (128, 4096, None)
    few = parse_case("q1s1k")
    assert (
        candidates(few, "hopper_decode", H200)[0]
        == vars(choose_hopper_decode_tile(128, 128, keys_per_sm=64))
        != tiles[0]
    )
    assert group_of(few, "hopper_decode", H200) == replace(group, work=64), (
        "little work has a tile of its own"
    )


def test_hopper_prefills_of_windows_are_a_kind_of_their_own() -> None:
    """What is measured there must not be taken for rows without a window, nor for other pages."""
    full, narrow = (
        parse_case("q8k@d=64,heads=64/8"),
        parse_case("q8k@d=64,heads=64/8,window=128,sinks"),
    )
    group = group_of(full, "hopper_prefill", H200)
    assert (group.block_size, group.visible) == (16, (1025, None)) and group_of(
        narrow, "hopper_prefill", H200
    ) == replace(group, visible=(1, 256))
    assert group_of(parse_case("q8k@d=64,heads=64/8,page=128"), "hopper_prefill", H200) == replace(
        group, block_size=128
    )
    assert group_of(full, "prefill", H200).visible is None
    for case, window in ((full, None), (narrow, 128)):
        tried = candidates(case, "hopper_prefill", H200)
        assert tried[0] == vars(choose_hopper_tile(64, 64, block_size=16, visible=window)), (
            "today's tile of such layers comes first"
        )
        assert ({tile["block_n"] for tile in tried} == {32, 64, 128}) == (window is not None)


def test_entries_of_hopper_prefills_say_what_was_measured_and_shadow_nothing_else() -> None:
    tile = {"block_n": 64, "stages": 3, "persistent": True, "q_stages": 2}
    trials = []
    for text in ("q8k@d=64,heads=64/8", "q8k@d=64,heads=64/8,window=128,sinks"):
        case = parse_case(text)
        group, today = (
            group_of(case, "hopper_prefill", H200),
            candidates(case, "hopper_prefill", H200)[0],
        )
        trials += [Trial(group, text, today, 10.0, True), Trial(group, text, tile, 9.0, False)]
    endless, narrow = best_entries(trials, "now")
    assert (endless["block_size"], endless["visible"]) == ([16, 16], [1025, None]) and narrow[
        "visible"
    ] == [1, 256]
    for entry, mine, others in (
        (endless, (None, 4096), (128, 300)),
        (narrow, (64, 128), (None, 300)),
    ):
        table = parse_table(
            {"schema": 1, "chip": "x", "provenance": {"now": ""}, "tiles": [entry]}, "x"
        )
        for visible in (*mine, *others):
            usual = choose_hopper_tile(64, 64, block_size=16, visible=visible)
            chosen = choose_hopper_tile(64, 64, block_size=16, visible=visible, tuned=table)
            assert chosen == (HopperTile(**tile) if visible in mine else usual), (entry, visible)
    document = merged(
        {"provenance": {}, "tiles": [endless, narrow], "backends": []},
        "now",
        {},
        [{**narrow, "tile": {}}],
        [],
    )
    assert [line["visible"] for line in document["tiles"]] == [[1, 256], [1025, None]], (
        "one class does not replace another"
    )


def test_operations_are_those_that_can_run() -> None:
    every = ("decode", "prefill", "hopper_prefill", "hopper_decode")
    assert operations(parse_case("8q1s8k"), H200, every) == ["decode", "hopper_decode"]
    assert (
        operations(parse_case("8q8s8k@heads=64/4"), H200, every)
        == operations(parse_case("8q1s8k"), L4, every)
        == ["decode"]
    )
    assert operations(parse_case("q2k"), H200, every) == ["prefill", "hopper_prefill"]
    assert operations(parse_case("q2k"), H200, ("decode",)) == []
    assert operations(parse_case("4q1s2k_q2k"), H200, every) == []
    assert (
        operations(parse_case("q2k"), L4, every)
        == operations(parse_case("q2k@dtype=float32"), H200, every)
        == ["prefill"]
    )


def _trials(times: dict[tuple[str, int], list[float | None]]) -> list[Trial]:
    """(case, work) -> times of tiles of 64, 32 and 128 keys, the first being today's."""
    found = []
    for (case, work), values in times.items():
        group = Group("decode", "async", "16-bit", 128, 16, None, work)
        for number, (block_n, us) in enumerate(zip((64, 32, 128), values, strict=True)):
            tile = {"block_m": 16, "block_n": block_n, "num_warps": 4, "num_stages": 2}
            found.append(Trial(group, case, tile, us, number == 0, "" if us else "wrong"))
    return found


def _chosen(entries: list[dict[str, Any]]) -> list[tuple[Any, int]]:
    return [(entry.get("keys_per_sm"), entry["tile"]["block_n"]) for entry in entries]


def test_one_tile_for_all_work_is_one_entry() -> None:
    entries = best_entries(
        _trials({("a", 1024): [10.0, 9.0, 12.0], ("b", 4096): [20.0, 18.0, 25.0]}), "now"
    )
    assert _chosen(entries) == [(None, 32)]
    assert entries[0]["measured"] == {
        "a": {"us": 9.0, "before_us": 10.0},
        "b": {"us": 18.0, "before_us": 20.0},
    }
    assert entries[0]["rows"] == [16, 16] and entries[0]["head_size"] == [128, 128]


def test_tiles_that_differ_with_work_cover_all_of_it() -> None:
    times: dict[tuple[str, int], list[float | None]] = {
        ("big", 65536): [100.0, 99.5, 90.0],
        ("small", 1024): [10.0, 9.0, 12.0],
    }
    entries = best_entries(_trials({**times, ("mid", 4096): [20.0, 18.0, 25.0]}), "now")
    assert _chosen(entries) == [([0, 4096], 32), ([4097, None], 128)]
    table = parse_table(
        {"schema": 1, "chip": "x", "provenance": {"now": ""}, "tiles": entries}, "x"
    )
    assert (
        choose_decode_tile(
            128, 128, 2, 2, 4, 227 * KB, "async", keys_per_sm=1 << 20, tuned=table
        ).block_n
        == 128
    )


def test_today_stays_unless_it_is_beaten_by_a_margin_and_everywhere() -> None:
    """A wrong tile, or one that was not timed on every case of its group, never counts."""
    assert _chosen(best_entries(_trials({("a", 1024): [10.0, 9.9, None]}), "now")) == [(None, 64)]
    assert _chosen(best_entries(_trials({("a", 1024): [10.0, None, 11.0]}), "now")) == [(None, 64)]
    assert _chosen(
        best_entries(
            _trials({("a", 1024): [10.0, 5.0, 11.0], ("b", 1024): [10.0, None, 9.0]}), "now"
        )
    ) == [(None, 64)]
    assert best_entries(_trials({("a", 1024): [None, 5.0, 4.0]}), "now") == [], (
        "without today's time there is nothing to compare with"
    )


def _row(case: BenchCase, backend: str, us: float | None, **changes: Any) -> Row:
    told = {
        "case": case.name,
        "kind": case.kind,
        "batch": str(case.batch),
        "shape": case.shape,
        "settings": case.to_json(),
        "backend": backend,
    }
    return Row(**{**told, "status": "ok", "checked": True, "us": us, **changes})


def test_backends_are_ranked_by_layer_over_all_their_cases() -> None:
    one, two, other = parse_case("q1s64"), parse_case("8q1s64"), parse_case("q1s64@d=64")
    rows = [
        _row(one, "a", 10.0),
        _row(one, "b", 5.0),
        _row(two, "a", 10.0),
        _row(two, "b", 80.0),
        _row(other, "a", 9.0),
        _row(other, "b", 3.0),
    ]
    rows += [
        _row(one, "c", None, status="wrong", reason="max error"),
        _row(two, "c", 1.0),
        _row(one, "d", 1.0, checked=False),
    ]
    first, second = rank_rows(rows, "now")
    assert first["ranking"] == ["a", "b"] and first["relative"] == {"a": 1.0, "b": 2.0}
    assert first["left_out"] == {"c": "wrong on q1s64: max error", "d": "ok on q1s64: not checked"}
    assert second["ranking"] == ["b", "a"] and second["layer"] == tuning.layer_class(other.spec)
    assert first["microseconds"]["8q1s64"] == {"a": 10.0, "b": 80.0, "c": 1.0}


def test_a_table_grows_and_what_is_measured_again_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "chip.json"
    empty = read_document(path, "cpu")
    old = best_entries(
        _trials({("a", 1024): [10.0, 9.0, 12.0], ("b", 4096): [20.0, 25.0, 15.0]}), "old"
    )
    layer = tuning.layer_class(parse_case("q1s64").spec)
    rank = {"layer": layer, "ranking": ["torch"], "relative": {"torch": 1.0}, "provenance": "old"}
    write_document(path, merged(empty, "old", {"date": "then"}, old, [rank]))
    assert [len(read_document(path, "cpu")[part]) for part in ("tiles", "backends")] == [2, 1]
    new = best_entries(_trials({("a", 1024): [10.0, 9.0, 8.0]}), "new")
    write_document(path, merged(read_document(path, "cpu"), "new", {"date": "now"}, new, []))
    found = read_document(path, "cpu")
    assert (
        found["tiles"] == new
        and found["backends"] == [rank]
        and set(found["provenance"]) == {"old", "new"}
    )
    assert len(path.read_text().splitlines()) < 25, "a line for each entry"
    with pytest.raises(
        ContractError,
        match="holds the table of 'cpu' and this is 'NVIDIA H200': write to another file",
    ):
        read_document(path, "NVIDIA H200")
    path.write_text("[]")
    with pytest.raises(ContractError, match="holds no tuning table"):
        read_document(path, "cpu")


def test_the_whole_command_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured, judged, written, and followed: explain names the table."""
    out = tmp_path / "cpu.json"
    monkeypatch.setenv("ATTNLIB_TUNING", "off")
    assert (
        main(
            [
                "tune",
                "--device",
                "cpu",
                *SMALL,
                "--shapes",
                "q1s24,q9",
                "--backends",
                "torch",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert (
        "tiles are measured on a GPU only" in printed
        and f"wrote 0 tiles and 1 rankings to {out}" in printed
    )
    (rank,) = json.loads(out.read_text())["backends"]
    assert (
        rank["ranking"] == ["torch"]
        and set(rank["microseconds"]) == {"q1s24@spec", "q9@spec"}
        and rank["microseconds"]["q9@spec"]["torch"] > 0
    )
    (facts,) = json.loads(out.read_text())["provenance"].values()
    assert (
        facts["command"].startswith("attnlib tune --device cpu")
        and facts["torch"] == torch.__version__
        and facts["date"]
    )
    monkeypatch.setenv("ATTNLIB_TUNING", str(out))
    assert main(["explain", "--device", "cpu", *SMALL]) == 0
    assert (
        f"measured fastest of torch for such layers on this chip: {out}" in capsys.readouterr().out
    )


def test_time_that_is_over_leaves_a_table_of_what_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cpu.json"
    words = [
        "tune",
        "--device",
        "cpu",
        *SMALL,
        "--shapes",
        "q1s24",
        "--backends",
        "torch",
        "--out",
        str(out),
        "--limit-seconds",
        "0",
    ]
    assert main(words) == 1 and not out.exists()
    assert "not run, the limit of 0 s was reached: q1s24@spec" in capsys.readouterr().out


def test_rankings_come_from_bench_results_of_this_chip_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, out = tmp_path / "bench.json", tmp_path / "cpu.json"
    assert (
        main(
            [
                "bench",
                "q1s24@heads=4/2,d=32,dtype=float32",
                "--device",
                "cpu",
                "--backends",
                "torch",
                "--json",
                str(results),
            ]
        )
        == 0
    )
    assert main(["tune", "--device", "cpu", "--from-bench", str(results), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["backends"][0]["ranking"] == ["torch"]
    document = json.loads(results.read_text())
    document["runs"][0]["provenance"]["gpu"] = "NVIDIA H200"
    results.write_text(json.dumps(document))
    capsys.readouterr()
    assert main(["tune", "--device", "cpu", "--from-bench", str(results), "--out", str(out)]) == 2
    assert "was measured on 'NVIDIA H200' and this is 'cpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ops", "decode"], "tiles are measured on a GPU and this is cpu; leave --ops out"),
        (
            ["--ops", "dekode"],
            "--ops dekode is not known; write decode, prefill, hopper_prefill, hopper_decode, or none",
        ),
        (
            ["--shapes", "q1s8"],
            "ATTNLIB_TUNING=off: there is no table to write; unset it, or name a file by --out",
        ),
    ],
)
def test_what_cannot_be_done_is_said(
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("ATTNLIB_TUNING", "off")
    out = [] if "--shapes" in words else ["--out", str(tmp_path / "x.json")]
    assert main(["tune", "--device", "cpu", *words, *out]) == 2 and told in capsys.readouterr().err


def test_tiles_are_judged_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate runs as the kernel's own choice, and one whose answer is wrong gets no time. Interpreted, the times mean nothing."""
    from attnlib.ops.triton import paged_decode as room

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = parse_case("q1s20@heads=2/1,d=16,dtype=float32")
    limits = limits_of(torch.empty(0, device=device))
    seen: list[int] = []
    choose, attend = room.choose_decode_tile, room.paged_decode

    def recorded(*args: Any, **options: Any) -> Tile:
        seen.append(choose(*args, **options).block_n)
        return choose(*args, **options)

    def wrong_for_128(query: torch.Tensor, *args: Any, out: torch.Tensor, **options: Any) -> None:
        attend(query, *args, out=out, **options)
        tuned = limits_of(query).tuned
        if tuned is not None and dict(tuned.entries[0].tile)["block_n"] == 128:
            out.add_(0.5)

    monkeypatch.setattr(room, "choose_decode_tile", recorded)
    monkeypatch.setattr(room, "paged_decode", wrong_for_128)
    told: list[str] = []
    group = group_of(case, "decode", limits)
    trials = measure_tiles(
        case, "decode", group, device, quick=True, expired=lambda: False, report=told.append
    )
    tried = {trial.tile["block_n"]: trial for trial in trials}
    assert {32, 64, 128} <= set(tried) == set(seen)
    assert (
        tried[128].us is None
        and "over budget" in tried[128].reason
        and all(trial.us for n, trial in tried.items() if n != 128)
    )
    assert len(told) == len(trials) and limits_of(torch.empty(0, device=device)).tuned is None, (
        "the table of before is back"
    )
    stopped = measure_tiles(
        case, "decode", group, device, quick=True, expired=lambda: True, report=told.append
    )
    assert [trial.today for trial in stopped] == [True], "out of time after the first"
