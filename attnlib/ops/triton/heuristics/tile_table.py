"""Tile tables: which tile for which work, as readable JSON with the provenance of every entry.

Shipped tables stand in `tables/`, one for each family of chips (and one of numbers that are no tiles, `decode_numbers`);
`attnlib tune` writes tables of the same form for one chip. They are read when a tile is first chosen, never at import,
and this module imports no triton, so a table can be checked on any machine.

    {"schema": 1, "chip": "any" or the chip's name,
     "provenance": {NAME: how, where, with which versions and by which command it was measured},
     "tiles": [{"op": "decode", "products": ["async"], "elements": ["16-bit", "fp8"], "head_size": [65, 128],
                "rows": [16, 16], "keys_per_sm": [0, 4096],
                "tile": {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3}, "provenance": NAME,
                "spills": 64}]}

Ranges include both ends, null is no bound, and a condition that is left out always holds. `block_size` and `visible` are
known to the Hopper prefill only; tables that are measured there say both, lest a tile for long rows be taken for windows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlib.errors import ContractError
from attnlib.ops.triton.heuristics.tile_entries import (
    CONDITIONS,
    ELEMENTS,
    OPS,
    PRODUCTS,
    Situation,
    TileEntry,
    parse_entry,
)

__all__ = [
    "CONDITIONS", "ELEMENTS", "OPS", "PRODUCTS", "VISIBLE_EDGES", "Situation", "TileEntry", "TileTable", "matching",
    "parse_table", "read_table", "shipped_tables", "visible_class", "work_bounds", "work_class", "work_where_it_matters",
]  # fmt: skip

VISIBLE_EDGES = (256, 512, 1024)
"""Ends of the classes of windows; every bound on `visible` in the shipped tables is one of them, and a test says so."""

_SCHEMA = 1
_FOLDER = Path(__file__).with_name("tables")


@dataclass(frozen=True, eq=False)
class TileTable:
    """A table; compared and hashed by identity, so that it may be part of a cache's key.

    Attributes:
        name: where it was read from.
        chip: the chip that it was measured on, or "any".
        entries: its lines; the first that matches and fits counts.
    """

    name: str
    chip: str
    entries: tuple[TileEntry, ...]


def work_class(num_reqs: int, num_kv_heads: int, visible: int, num_sms: int) -> int:
    """Keys of one KV head that a multiprocessor reads in a decode, rounded up to a power of 4.

    Args:
        num_reqs: requests of the batch.
        num_kv_heads: KV heads.
        visible: the most keys that a request's queries see; an upper bound, as everything that chooses a tile.
        num_sms: multiprocessors of the chip.
    """
    keys = -(-max(1, num_reqs * num_kv_heads * visible) // num_sms)
    return 1 << 2 * -(-(keys - 1).bit_length() // 2)


def work_where_it_matters(
    op: str, num_reqs: int, num_kv_heads: int, visible: int, num_sms: int, tuned: TileTable | None
) -> int | None:
    """The class of work, where the tiles of an operation depend on it at all; a row's bits then depend on its neighbours' bounds.

    Args:
        op: of the tables.
        num_reqs: as in `work_class`, like the other numbers.
        num_kv_heads: likewise.
        visible: likewise.
        num_sms: likewise.
        tuned: the user's own table for the chip.
    """
    return work_class(num_reqs, num_kv_heads, visible, num_sms) if work_bounds(op, tuned) else None


def visible_class(visible: int | None) -> tuple[int, int | None]:
    """(least, most) keys of the windows that share a tile in a prefill: narrow ones in three classes, wide ones with none.

    Args:
        visible: keys that one query sees at most; None without a window.
    """
    least = 1
    for edge in VISIBLE_EDGES:
        if visible is not None and visible <= edge:
            return least, edge
        least = edge + 1
    return least, None


def matching(situation: Situation, tuned: TileTable | None = None) -> Iterator[TileEntry]:
    """Entries for a situation, best first: those of the user's table before the shipped ones."""
    for table in (*((tuned,) if tuned else ()), *shipped_tables()):
        for entry in table.entries:
            if entry.matches(situation):
                yield entry


@functools.lru_cache(maxsize=64)
def work_bounds(op: str, tuned: TileTable | None = None) -> tuple[int, ...]:
    """The bounds on `keys_per_sm` that any entry for `op` has, rising: work between two of them gets one tile. Empty
    when tiles do not depend on work."""
    found = set()
    for table in (*((tuned,) if tuned else ()), *shipped_tables()):
        for entry in table.entries:
            for name, least, most in entry.ranges if entry.op == op else ():
                if name == "keys_per_sm":
                    found |= {(least - 1) if least else None, most}
    return tuple(sorted(bound for bound in found if bound))


@functools.cache
def shipped_tables() -> tuple[TileTable, ...]:
    """The tables of the package, read once."""
    return tuple(read_table(path) for path in sorted(_FOLDER.glob("*.json")))


def read_table(path: Path) -> TileTable:
    """The tiles of a table file.

    Raises:
        ContractError: not JSON, or not a table; the message names the file, the entry and what is wrong with it.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ContractError(
            f"tile table {path} is not JSON: {error}; write it anew with attnlib tune"
        ) from None
    return parse_table(data, str(path))


def parse_table(data: Any, name: str) -> TileTable:
    """A table from its JSON.

    Raises:
        ContractError: not a table; the message names the table, the entry and what is wrong with it.
    """
    if not isinstance(data, Mapping) or data.get("schema") != _SCHEMA:
        found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
        raise ContractError(
            f"tile table {name} has schema {found!r} and this version reads {_SCHEMA}; write it anew with attnlib tune"
        )
    sources, lines = data.get("provenance"), data.get("tiles", [])
    if (
        not isinstance(sources, Mapping)
        or not isinstance(lines, Sequence)
        or not isinstance(data.get("chip"), str)
    ):
        raise ContractError(
            f"tile table {name} needs 'chip' (text), 'provenance' (an object) and 'tiles' (a list); write it anew with attnlib tune"
        )
    entries = []
    for index, line in enumerate(lines):
        try:
            entries.append(parse_entry(line, sources))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ContractError(
                f"tile table {name}, tiles[{index}]: {what}; correct it or write the table anew with attnlib tune"
            ) from None
    return TileTable(name, data["chip"], tuple(entries))
