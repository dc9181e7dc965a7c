"""Tile tables: which tile for which problem, as readable JSON with the provenance of every entry.

`tables/` holds the shipped tables, one per family of chips; `attnlib tune` writes tables of the
same form for one chip. Tables are read when a tile is first chosen, never at import. This module
imports no triton, so that a table can be checked on any machine.

    {"schema": 1, "chip": "any" or the name of a chip,
     "provenance": {NAME: how, where, with which versions and which command it was measured},
     "tiles": [{"op": "decode", "products": ["async"], "elements": ["16-bit", "fp8"],
                "head_size": [65, 128], "rows": [16, 16], "keys_per_sm": [0, 4096],
                "tile": {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3},
                "provenance": NAME, "spills": 64}]}

Ranges include both ends, null is unbounded, and an omitted condition always holds. `block_size` and
`visible` are conditions of the Hopper prefill only. Tables that are measured there state both, so
that a tile for long rows is not used for windows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attnlib.errors import ContractError
from attnlib.ops.triton.heuristics.tile_entries import (
    CONDITIONS,
    ELEMENTS,
    OPS,
    PRODUCTS,
    TileEntry,
    TileProblem,
    page_elements,
    parse_entry,
)

__all__ = [
    "CONDITIONS",
    "ELEMENTS",
    "OPS",
    "PRODUCTS",
    "VISIBLE_EDGES",
    "TileEntry",
    "TileProblem",
    "TileTable",
    "depends_on_work",
    "matching",
    "page_elements",
    "parse_table",
    "read_table",
    "relevant_work_class",
    "shipped_tables",
    "visible_class",
    "work_bounds",
    "work_class",
]

VISIBLE_EDGES = (256, 512, 1024)
"""Upper ends of the window classes. Bounds on `visible` in the shipped tables are among them."""

_SCHEMA = 1
_DIRECTORY = Path(__file__).with_name("tables")


@dataclass(frozen=True, eq=False)
class TileTable:
    """A table; compared and hashed by identity, so that it can be part of a cache key.

    Attributes:
        name: where it was read from.
        chip: the chip that it was measured on, or "any".
        entries: its entries; the first one that matches and fits is used.
    """

    name: str
    chip: str
    entries: tuple[TileEntry, ...]

    @cached_property
    def work_bounds(self) -> dict[str, frozenset[int]]:
        """The bounds on `keys_per_sm` of the entries, by operation; none for operations whose tiles
        do not depend on work."""
        found: dict[str, set[int]] = {}
        for entry in self.entries:
            for name, least, most in entry.ranges:
                if name == "keys_per_sm":
                    bounds = (least - 1 if least else None, most)
                    found.setdefault(entry.op, set()).update(b for b in bounds if b)
        return {op: frozenset(bounds) for op, bounds in found.items() if bounds}


def work_class(num_reqs: int, num_kv_heads: int, visible: int, num_sms: int) -> int:
    """Return the keys of one KV head that a multiprocessor reads in a decode, as a power of 4.

    Rounded up.

    Args:
        num_reqs: requests of the batch.
        num_kv_heads: KV heads.
        visible: keys visible to a request's queries, an upper bound.
        num_sms: multiprocessors of the chip.
    """
    keys = -(-max(1, num_reqs * num_kv_heads * visible) // num_sms)
    return 1 << 2 * -(-(keys - 1).bit_length() // 2)


def relevant_work_class(
    op: str, num_reqs: int, num_kv_heads: int, visible: int, num_sms: int, tuned: TileTable | None
) -> int | None:
    """Return `work_class` if the tiles of an operation depend on it, else None.

    The bits of a row depend on the bounds of the whole batch only in the first case.

    Args:
        op: operation of the tables.
        num_reqs, num_kv_heads, visible, num_sms: see `work_class`.
        tuned: the user's table for the chip.
    """
    if depends_on_work(op, tuned):
        return work_class(num_reqs, num_kv_heads, visible, num_sms)
    return None


def depends_on_work(op: str, tuned: TileTable | None) -> bool:
    """Return whether the tiles of an operation depend on `work_class`.

    Args:
        op: operation of the tables.
        tuned: the user's table for the chip.
    """
    for table in _tables(tuned):  # every decode without a layer asks, and generators are slower
        if op in table.work_bounds:
            return True
    return False


def visible_class(visible: int | None) -> tuple[int, int | None]:
    """Return (least, most) keys of the windows that share a prefill tile.

    There are three classes of narrow windows and one of wide or no windows.

    Args:
        visible: keys visible to one query, at most; None without a window.
    """
    least = 1
    for edge in VISIBLE_EDGES:
        if visible is not None and visible <= edge:
            return least, edge
        least = edge + 1
    return least, None


def matching(problem: TileProblem, tuned: TileTable | None = None) -> Iterator[TileEntry]:
    """Yield the entries for a problem, best first; the user's table precedes the shipped ones."""
    for table in _tables(tuned):
        for entry in table.entries:
            if entry.matches(problem):
                yield entry


def _tables(tuned: TileTable | None) -> tuple[TileTable, ...]:
    """The tables in order of precedence."""
    return shipped_tables() if tuned is None else (tuned, *shipped_tables())


def work_bounds(op: str, tuned: TileTable | None = None) -> tuple[int, ...]:
    """Return the bounds on `keys_per_sm` of all entries for `op`, in ascending order.

    All work between two of them has the same tile. Empty if tiles do not depend on work.
    """
    found: set[int] = set()
    for table in _tables(tuned):
        found |= table.work_bounds.get(op, frozenset())
    return tuple(sorted(found))


@functools.cache
def shipped_tables() -> tuple[TileTable, ...]:
    """Return the tables of the package; they are read once."""
    return tuple(read_table(path) for path in sorted(_DIRECTORY.glob("*.json")))


def read_table(path: Path) -> TileTable:
    """Read a table from a file.

    Raises:
        ContractError: not JSON, or not a table; the message names the file, the entry and the
            error.
        OSError: the file cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ContractError(
            f"tile table {path} is not JSON: {error}; recreate it with attnlib tune"
        ) from None
    return parse_table(data, str(path))


def parse_table(data: Any, name: str) -> TileTable:
    """Create a table from its JSON.

    Raises:
        ContractError: not a table; the message names the table, the entry and the error.
    """
    if not isinstance(data, Mapping) or data.get("schema") != _SCHEMA:
        found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
        raise ContractError(
            f"tile table {name} has schema {found!r} and this version reads {_SCHEMA}; "
            "recreate it with attnlib tune"
        )
    provenances, lines = data.get("provenance"), data.get("tiles", [])
    if (
        not isinstance(provenances, Mapping)
        or not isinstance(lines, Sequence)
        or not isinstance(data.get("chip"), str)
    ):
        raise ContractError(
            f"tile table {name} needs 'chip' (text), 'provenance' (an object) and 'tiles' "
            "(a list); recreate it with attnlib tune"
        )
    entries = []
    for index, line in enumerate(lines):
        try:
            entries.append(parse_entry(line, provenances))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ContractError(
                f"tile table {name}, tiles[{index}]: {reason}; correct it or recreate the table "
                "with attnlib tune"
            ) from None
    return TileTable(name, data["chip"], tuple(entries))
