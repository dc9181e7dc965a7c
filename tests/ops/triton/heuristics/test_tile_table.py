"""Tile tables: the shipped tables are complete, errors are named, and choices follow the tables."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.ops.triton.heuristics.choose_tiles import (
    TileRequest,
    choose_decode_tile,
    choose_prefill_tile,
)
from attnlib.ops.triton.heuristics.hopper_decode_tiles import DecodeTile, decode_shared_bytes
from attnlib.ops.triton.heuristics.hopper_tiles import HopperTile, choose_hopper_tile
from attnlib.ops.triton.heuristics.hopper_tiles import shared_bytes as hopper_bytes
from attnlib.ops.triton.heuristics.tile_table import (
    ELEMENTS,
    PRODUCTS,
    VISIBLE_EDGES,
    TileProblem,
    TileTable,
    matching,
    parse_table,
    shipped_tables,
    visible_class,
    work_bounds,
    work_class,
)
from attnlib.ops.triton.heuristics.tiles import (
    Tile,
    shared_bytes,
)
from tests.fresh_process import run_program

KB = 1024
LINE: dict[str, Any] = {
    "op": "decode",
    "tile": {"block_m": 16, "block_n": 128, "num_warps": 4, "num_stages": 2},
    "provenance": "mine",
}


def _table(*lines: dict[str, Any]) -> TileTable:
    return parse_table(
        {
            "schema": 1,
            "chip": "test chip",
            "provenance": {"mine": {"command": "by hand"}},
            "tiles": list(lines),
        },
        "mine.json",
    )


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("elements", [x for x in ELEMENTS if x[:3] not in ("int", "fp4")])
@pytest.mark.parametrize("op", ["decode", "prefill", "latent"])
def test_shipped_tables_cover_every_chip_format_and_size(
    op: str, products: str, elements: str
) -> None:
    """P6: otherwise the first call on such a chip would fail."""
    for width in (16, 64, 96, 128, 192, 256, 512, 576, 1024):
        for rows in (16, 64, 1 << 20):
            found = list(matching(TileProblem(op, products, elements, width, rows)))
            assert found, (op, products, elements, width)
            assert all(len(entry.provenance) > 3 for entry in found)


def test_every_shipped_entry_is_reachable() -> None:
    """The first entry that fits is used, so later ones of the same conditions need less memory."""
    for table in shipped_tables():
        seen: dict[tuple[Any, ...], int] = {}
        for entry in table.entries:
            width, tile = (
                dict((name, least) for name, least, _ in entry.ranges)["head_size"],
                dict(entry.tile),
            )
            if entry.op == "hopper_prefill":
                need = hopper_bytes(HopperTile(**tile), 128, 128)
            elif entry.op == "hopper_decode":
                need = decode_shared_bytes(DecodeTile(**tile), 128, 128)
            else:
                query, products = (
                    4 if entry.elements == ("float32",) else 2,
                    entry.products[0] if entry.products else "sync",
                )
                need = shared_bytes(Tile(**tile), width, width, query, query, products)
            key = (entry.op, entry.products, entry.elements, entry.ranges)
            assert need < seen.get(key, 1 << 30), (table.name, entry)
            seen[key] = need


def test_tables_are_read_on_first_use() -> None:
    """Speed rules: imports open no table."""
    program = """
import sys
opened = []
sys.addaudithook(lambda name, args: opened.append(str(args[0])) if name == "open" else None)
import attnlib, attnlib.ops.triton.heuristics.choose_tiles as tiles
assert not [path for path in opened if path.endswith(".json")], opened
tiles.choose_decode_tile(tiles.TileRequest((128, 128), (2, 2), 4, 1 << 17, "sync"))
tables = [path for path in opened if "heuristics/tables" in path and path.endswith(".json")]
assert len(tables) >= 2
assert "triton" not in sys.modules
"""
    done = run_program(program)
    assert done.returncode == 0, done.stderr


def test_tuned_table_precedes_if_it_matches_and_fits() -> None:
    tuned = _table({**LINE, "head_size": [65, 128], "rows": [16, 16], "products": ["async"]})
    mine, shipped = (
        Tile(16, 128, 4, 2),
        choose_decode_tile(TileRequest((128, 128), (2, 2), 4, 227 * KB, "async")),
    )
    assert shipped != mine
    assert (
        choose_decode_tile(TileRequest((128, 128), (2, 2), 4, 227 * KB, "async", tuned=tuned))
        == mine
    )
    for arguments in (
        ((64, 64), (2, 2), 4, 227 * KB, "async"),
        ((128, 128), (2, 2), 32, 227 * KB, "async"),
        ((128, 128), (2, 2), 4, 99 * KB, "sync"),
    ):
        assert choose_decode_tile(TileRequest(*arguments, tuned=tuned)) == choose_decode_tile(
            TileRequest(*arguments)
        )
    assert (
        choose_decode_tile(
            TileRequest((128, 128), (2, 2), 4, 64 * KB, "async", tuned=tuned)
        ).block_n
        < 128
    ), "128 keys do not fit in 64 KB"


def test_prefill_and_hopper_tiles_come_from_the_same_table() -> None:
    prefill = {
        "op": "prefill",
        "tile": {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2},
        "provenance": "mine",
    }
    hopper = {
        "op": "hopper_prefill",
        "tile": {"block_n": 64, "stages": 3, "persistent": True},
        "provenance": "mine",
        "block_size": [128, 256],
    }
    tuned = _table(prefill, hopper)
    assert choose_prefill_tile(
        TileRequest((128, 128), (2, 2), 4096, 227 * KB, "async", tuned=tuned)
    ) == Tile(64, 64, 4, 2)
    assert choose_prefill_tile(
        TileRequest((128, 128), (2, 2), 20, 227 * KB, "async", tuned=tuned)
    ) == Tile(32, 64, 4, 2)
    assert choose_hopper_tile(128, 128, block_size=128, tuned=tuned) == HopperTile(
        64, 3, persistent=True
    )
    usual = HopperTile(128, 2, persistent=True, q_stages=2)
    assert (
        choose_hopper_tile(128, 128, block_size=16, tuned=tuned)
        == choose_hopper_tile(128, 128)
        == usual
    )
    assert (
        choose_hopper_tile(128, 128, visible=513) == usual
        and choose_hopper_tile(128, 128, visible=128).block_n == 64
    )
    with pytest.raises(UnsupportedConfigError, match="head sizes 576"):
        choose_hopper_tile(576, 576, tuned=tuned)


def test_tuned_entry_applies_to_its_window_class_only() -> None:
    """A tile that is fast for long rows is slow for a few keys, and vice versa."""
    line = {
        "op": "hopper_prefill",
        "tile": {"block_n": 128, "stages": 2, "persistent": True},
        "provenance": "mine",
        "block_size": [16, 16],
    }
    endless, narrow = (
        _table({**line, "visible": list(visible_class(None))}),
        _table({**line, "visible": list(visible_class(128))}),
    )
    for visible in (None, 128, 256, 257, 512, 513, 1024, 1025, 8192):
        usual = choose_hopper_tile(64, 64, block_size=16, visible=visible)
        mine = HopperTile(128, 2, persistent=True)
        assert usual != mine
        for tuned, measured in ((endless, (None, 1025, 8192)), (narrow, (128, 256))):
            found = choose_hopper_tile(64, 64, block_size=16, visible=visible, tuned=tuned)
            assert found == (mine if visible in measured else usual), visible
    assert choose_hopper_tile(64, 64, block_size=64, tuned=endless) == choose_hopper_tile(64, 64), (
        "another block size was not measured"
    )


def test_window_classes_are_contiguous_and_match_shipped_entries() -> None:
    classes = [visible_class(keys) for keys in (1, 256, 257, 512, 513, 1024, 1025)]
    assert classes == [
        (1, 256),
        (1, 256),
        (257, 512),
        (257, 512),
        (513, 1024),
        (513, 1024),
        (1025, None),
    ]
    assert visible_class(None) == (1025, None)
    shipped = [
        bounds
        for table in shipped_tables()
        for entry in table.entries
        for name, *bounds in entry.ranges
        if name == "visible"
    ]
    assert shipped and all(least == 1 and most in VISIBLE_EDGES for least, most in shipped), (
        "a tuned entry would cover a part of a shipped one"
    )


def test_batch_invariant_tiles_do_not_depend_on_work() -> None:
    """M8: with `keys_per_sm=None`, entries with a bound on work do not match."""
    small = {**LINE, "keys_per_sm": [0, 1024]}
    large = {**LINE, "keys_per_sm": [16385, None], "tile": {**LINE["tile"], "block_n": 32}}
    tuned = _table(small, large)
    assert work_bounds("decode", tuned) == (1024, 16384) and work_bounds("prefill", tuned) == ()
    found = {
        work: choose_decode_tile(
            TileRequest((128, 128), (2, 2), 4, 227 * KB, "async", tuned=tuned), keys_per_sm=work
        ).block_n
        for work in (1, 1024, 4096, 65536)
    }
    assert found == {1: 128, 1024: 128, 4096: 64, 65536: 32}
    assert (
        choose_decode_tile(
            TileRequest((128, 128), (2, 2), 4, 227 * KB, "async", tuned=tuned)
        ).block_n
        == 64
    )


def test_work_classes_are_powers_of_four() -> None:
    assert [work_class(1, 1, keys, 1) for keys in (0, 1, 2, 4, 5, 16, 17)] == [
        1,
        1,
        4,
        4,
        16,
        16,
        64,
    ]
    assert work_class(64, 8, 8192, 132) == 65536 and work_class(1, 8, 8192, 132) == 1024


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"op": "dekode"}, r"op='dekode' must be one of decode, prefill, latent, hopper_prefill"),
    ({"tile": {"block_m": 16}}, r"tile needs the number 'block_n'"),
    (
        {"tile": {**LINE["tile"], "block_n": 48}},
        r"tile has block_n=48, which must be a power of two",
    ),
    (
        {"tile": {**LINE["tile"], "num_stages": 0}},
        r"tile has num_stages=0, which must be in \[1, 8\]",
    ),
    (
        {"tile": {**LINE["tile"], "color": 3}},
        r"tile has 'color', which tiles of decode do not have",
    ),
    ({"products": ["tensor"]}, r"products has 'tensor', which must be one of async, sync, mfma"),
    ({"head_size": ["a", 3]}, r"head_size=\['a', 3\] must be \[least, most\]"),
    ({"keys_per_sm": [0, 100]}, r"keys_per_sm=\[0, 100\] must end at a power of 4"),
    ({"provenance": "hearsay"}, r"provenance 'hearsay' is not one of 'mine'"),
    ({"speed": 3}, r"'speed' is not known"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_errors_name_the_table_and_the_entry(change: dict[str, Any], words: str) -> None:
    good = copy.deepcopy(LINE)
    with pytest.raises(
        ContractError, match=r"tile table mine.json, tiles\[1\]: " + words + r".*attnlib tune"
    ):
        _table(good, {**good, **change})


def test_other_schema_is_rejected() -> None:
    with pytest.raises(
        ContractError,
        match=r"has schema 7 and this version reads 1; recreate it with attnlib tune",
    ):
        parse_table({"schema": 7}, "old.json")
    with pytest.raises(ContractError, match="has schema 'list'"):
        parse_table([], "old.json")
