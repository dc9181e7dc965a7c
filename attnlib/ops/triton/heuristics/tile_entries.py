"""One line of a tile table: which work it is for, the tile that it names, and what is wrong with a line that is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CONDITIONS", "ELEMENTS", "OPS", "PRODUCTS", "Situation", "TileEntry", "parse_entry"]

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
        visible: keys that one query sees at most, by its window or chunk; None without one: more than any number, so that
            entries without an upper end on it match.
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
            if value is None and name == "visible":
                value = math.inf
            if (
                value is None
                or (least is not None and value < least)
                or (most is not None and value > most)
            ):
                return False
        return True


def parse_entry(line: Any, sources: Mapping[str, Any]) -> TileEntry:
    """An entry from a line's JSON.

    Args:
        line: the line.
        sources: the table's provenances by name.

    Raises:
        KeyError, TypeError, ValueError: not an entry; says what is wrong with it, and `tile_tables` where it stands.
    """
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
        raise ValueError(
            f"provenance {line['provenance']!r} is not among {', '.join(map(repr, sources))}"
        )
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
            if bound is not None and (
                bound < 1 or bound & (bound - 1) or bound.bit_length() % 2 == 0
            ):
                raise ValueError(
                    f"keys_per_sm={bounds!r} must end at a power of 4 and begin at 0 or one above a power of 4"
                )
    return least, most
