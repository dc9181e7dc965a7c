"""Tile tables: which tile for which work, as readable JSON with the provenance of every entry.

Shipped tables stand in `tables/`, one for each family of chips (and one of numbers that are no tiles, `decode_numbers`);
`attnlib tune` writes tables of the same form for one chip. They are read when a tile is first chosen, never at import,
and this module imports no triton, so a table can be checked on any machine.

    {"schema": 1, "chip": "any" or the chip's name,
     "provenance": {NAME: how, where, with which versions and by which command it was measured},
     "tiles": [{"op": "decode", "products": ["async"], "elements": ["16-bit", "fp8"], "head_size": [65, 128],
                "rows": [16, 16], "keys_per_sm": [0, 4096], "block_size": [16, 16],
                "tile": {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3}, "provenance": NAME,
                "spills": 64}]}

Ranges include both ends, null is no bound, and a condition that is left out always holds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlib.errors import ContractError

__all__ = [
    "CONDITIONS", "ELEMENTS", "OPS", "PRODUCTS", "Situation", "TileEntry", "TileTable", "matching", "parse_table",
    "read_table", "shipped_tables", "work_bounds", "work_class",
]  # fmt: skip

OPS = {
    "decode": ("block_m", "block_n", "num_warps", "num_stages"),
    "prefill": ("block_m", "block_n", "num_warps", "num_stages"),
    "hopper_prefill": ("block_n", "stages"),
    "hopper_decode": ("block_n", "stages"),
}
"""Operation -> numbers that its tiles must have."""

PRODUCTS = ("async", "sync", "mfma")
ELEMENTS = ("16-bit", "fp8", "fp8-bytes", "float32")
CONDITIONS = ("head_size", "rows", "keys_per_sm", "block_size", "visible")
"""Conditions that are ranges of numbers, in the words of `Situation`."""

_SCHEMA = 1
_FOLDER = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Situation:
    """What a tile is asked for.

    Attributes:
        op: one of `OPS`.
        products: how the chip multiplies.
        elements: "16-bit"; "fp8", 16-bit queries over a float8 cache, or "fp8-bytes", the same where the chip cannot
            convert float8 and the kernel decodes bytes, in more registers; or "float32".
        head_size: the wider of the two head sizes, as padded.
        rows: query tokens times heads of the group of the longest request, as a power of two of at least 16.
        keys_per_sm: class of work (`work_class`); None where it must not matter, so that entries with a bound on it
            do not match.
        block_size: N; None where it is not known, likewise.
        visible: keys that one query sees at most, by its window or chunk; None without one, likewise.
    """

    op: str
    products: str
    elements: str
    head_size: int
    rows: int
    keys_per_sm: int | None = None
    block_size: int | None = None
    visible: int | None = None


@dataclass(frozen=True)
class TileEntry:
    """One line of a table.

    Attributes:
        op: one of `OPS`.
        products: of which chips; empty for all.
        elements: of which formats; empty for all.
        ranges: condition -> (least, most); None is unbounded.
        tile: its numbers by name.
        provenance: where they come from.
        spills: bytes of local memory per thread that the compiler may use for it, on any chip that it is for; the
            compile tests hold the shipped tables to it.
    """

    op: str
    products: tuple[str, ...]
    elements: tuple[str, ...]
    ranges: tuple[tuple[str, int | None, int | None], ...]
    tile: tuple[tuple[str, Any], ...]
    provenance: str
    spills: int = 0

    def matches(self, now: Situation) -> bool:
        """Whether the entry is for this situation."""
        if self.op != now.op or (self.products and now.products not in self.products):
            return False
        if self.elements and now.elements not in self.elements:
            return False
        for name, least, most in self.ranges:
            value = getattr(now, name)
            if value is None or (least is not None and value < least) or (most is not None and value > most):
                return False
        return True


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
    return 4 ** -(-(keys - 1).bit_length() // 2)


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
        raise ContractError(f"tile table {path} is not JSON: {error}; write it anew with attnlib tune") from None
    return parse_table(data, str(path))


def parse_table(data: Any, name: str) -> TileTable:
    """A table from its JSON.

    Raises:
        ContractError: not a table; the message names the table, the entry and what is wrong with it.
    """
    if not isinstance(data, Mapping) or data.get("schema") != _SCHEMA:
        found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
        raise ContractError(f"tile table {name} has schema {found!r} and this version reads {_SCHEMA}; write it anew with attnlib tune")
    sources, lines = data.get("provenance"), data.get("tiles", [])
    if not isinstance(sources, Mapping) or not isinstance(lines, Sequence) or not isinstance(data.get("chip"), str):
        raise ContractError(f"tile table {name} needs 'chip' (text), 'provenance' (an object) and 'tiles' (a list); write it anew with attnlib tune")
    entries = []
    for index, line in enumerate(lines):
        try:
            entries.append(_entry(line, sources))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ContractError(f"tile table {name}, tiles[{index}]: {what}; correct it or write the table anew with attnlib tune") from None
    return TileTable(name, data["chip"], tuple(entries))


def _entry(line: Any, sources: Mapping[str, Any]) -> TileEntry:
    if not isinstance(line, Mapping):
        raise ValueError(f"is a {type(line).__name__} and must be an object")
    op, tile = line["op"], dict(line["tile"])
    known = {"op", "products", "elements", "tile", "provenance", "measured", "spills", *CONDITIONS}
    if strangers := sorted(set(line) - known):
        raise ValueError(f"{strangers[0]!r} is not known, only {', '.join(sorted(known))}")
    if op not in OPS:
        raise ValueError(f"op={op!r} must be one of {', '.join(OPS)}")
    if missing := [field for field in OPS[op] if not isinstance(tile.get(field), int)]:
        raise ValueError(f"tile needs the number {missing[0]!r}")
    if strangers := sorted(set(tile) - set(OPS[op])) if op != "hopper_prefill" else []:
        raise ValueError(f"tile has {strangers[0]!r}, which no tile of {op} has")
    for field in ("block_m", "block_n", "num_warps"):
        if field in tile and (tile[field] < 1 or tile[field] & (tile[field] - 1)):
            raise ValueError(f"tile has {field}={tile[field]}, which must be a power of two")
    for field in ("num_stages", "stages"):
        if field in tile and not 1 <= tile[field] <= 8:
            raise ValueError(f"tile has {field}={tile[field]}, which must be in [1, 8]")
    if line["provenance"] not in sources:
        raise ValueError(f"provenance {line['provenance']!r} is not among {', '.join(map(repr, sources))}")
    return TileEntry(
        op, _words(line, "products", PRODUCTS), _words(line, "elements", ELEMENTS),
        tuple((name, *_range(name, line[name])) for name in CONDITIONS if name in line),
        tuple(tile.items()), line["provenance"], int(line.get("spills", 0)),
    )  # fmt: skip


def _words(line: Mapping[str, Any], name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    words = tuple(line.get(name, ()))
    if wrong := [word for word in words if word not in known]:
        raise ValueError(f"{name} has {wrong[0]!r}, which must be one of {', '.join(known)}")
    return words


def _range(name: str, bounds: Any) -> tuple[int | None, int | None]:
    least, most = bounds
    for bound in (least, most):
        if bound is not None and not isinstance(bound, int):
            raise ValueError(f"{name}={bounds!r} must be [least, most], whole numbers or null")
    if name == "keys_per_sm":
        for bound in (least - 1 if least else None, most):
            if bound is not None and (bound < 1 or bound & (bound - 1) or bound.bit_length() % 2 == 0):
                raise ValueError(f"keys_per_sm={bounds!r} must end at a power of 4 and begin at 0 or one above a power of 4")
    return least, most
