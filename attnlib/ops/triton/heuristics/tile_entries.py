"""Entries of a tile table: the problems that an entry is for, its tile, and its validation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnlib.kv_formats import KVFormat

__all__ = [
    "CONDITIONS",
    "ELEMENTS",
    "OPS",
    "PRODUCTS",
    "TileEntry",
    "TileProblem",
    "page_elements",
    "parse_entry",
]

OPS = {
    "decode": ("block_m", "block_n", "num_warps", "num_stages"),
    "prefill": ("block_m", "block_n", "num_warps", "num_stages"),
    "latent": ("block_m", "block_n", "num_warps", "num_stages"),
    "hopper_prefill": ("block_n", "stages"),
    "hopper_decode": ("block_n", "stages"),
}
"""Operation -> the numbers that its tiles must have."""

PRODUCTS = ("async", "sync", "mfma")
"""Matrix instructions of a chip: asynchronous ones that read shared memory (wgmma, tcgen05),
mma.sync, and AMD's."""

ELEMENTS = (
    *("16-bit", "fp8", "fp8-bytes", "int8", "int4", "fp4", "int8-int4", "int8-fp4", "float32"),
)
CONDITIONS = ("head_size", "rows", "keys_per_sm", "pairs_per_sm", "block_size", "visible")
"""Conditions that are ranges of numbers, as named in `TileProblem`."""


@dataclass(frozen=True)
class TileProblem:
    """What a tile is chosen for.

    Attributes:
        op: one of `OPS`.
        products: matrix instructions of the chip, one of `PRODUCTS`.
        elements: "16-bit"; "fp8", 16-bit queries over a cache of 8-bit elements; "fp8-bytes", the
            same on a chip that cannot convert float8, where the kernel decodes bytes and needs more
            registers; "int8", "int4" and "fp4", the same over pages that hold scales, and
            "int8-int4" and "int8-fp4" over those with keys of 8 bits and values of 4; or "float32".
        head_size: the larger of the two head sizes, padded.
        rows: query tokens times heads per group of the longest request, as a power of two of at
            least 16.
        keys_per_sm: `work_class`; None if the tile must not depend on it: entries with a bound on
            it do not match.
        block_size: N; None if unknown: entries with a bound on it do not match.
        visible: keys visible to one query, at most, by its window or chunk. None is unbounded:
            only entries without an upper bound on it match.
        pairs_per_sm: (request, KV head) pairs per multiprocessor, rounded up; None if unknown:
            entries with a bound on it do not match.
    """

    op: str
    products: str
    elements: str
    head_size: int
    rows: int
    keys_per_sm: int | None = None
    block_size: int | None = None
    visible: int | None = None
    pairs_per_sm: int | None = None


@dataclass(frozen=True)
class TileEntry:
    """One entry of a table.

    Attributes:
        op: one of `OPS`.
        products: `PRODUCTS` that it is for; empty for all.
        elements: `ELEMENTS` that it is for; empty for all.
        ranges: (condition, least, most); None is unbounded.
        tile: the numbers of the tile by name.
        provenance: name of the table's provenance that the numbers come from.
        spills: bytes of local memory per thread that the compiled tile may use on any of its
            chips. The compile tests check the shipped tables.
    """

    op: str
    products: tuple[str, ...]
    elements: tuple[str, ...]
    ranges: tuple[tuple[str, int | None, int | None], ...]
    tile: tuple[tuple[str, Any], ...]
    provenance: str
    spills: int = 0

    def matches(self, problem: TileProblem) -> bool:
        """Return whether the entry is for this problem."""
        if self.op != problem.op or (self.products and problem.products not in self.products):
            return False
        if self.elements and problem.elements not in self.elements:
            return False
        for name, least, most in self.ranges:
            value = getattr(problem, name)
            if value is None and name == "visible":
                value = math.inf
            if (
                value is None
                or (least is not None and value < least)
                or (most is not None and value > most)
            ):
                return False
        return True


def page_elements(keys: KVFormat, values: KVFormat | None) -> str:
    """The elements of pages that hold their scales, of `ELEMENTS`; those of 8 bits are "int8".

    Args:
        keys: their format.
        values: that of the values, where it is another one.
    """
    sides = (keys,) if values is None else (keys, values)
    return "-".join(f"{'fp' if side.elements_per_group else 'int'}{side.bits}" for side in sides)


def parse_entry(line: Any, provenances: Mapping[str, Any]) -> TileEntry:
    """Create an entry from its JSON.

    Args:
        line: the JSON object.
        provenances: the table's provenances by name.

    Raises:
        KeyError, TypeError, ValueError: not an entry. `parse_table` adds the table and the index.
    """
    if not isinstance(line, Mapping):
        raise ValueError(f"is a {type(line).__name__} and must be an object")
    op, tile = line["op"], dict(line["tile"])
    known = {"op", "products", "elements", "tile", "provenance", "measured", "spills", *CONDITIONS}
    if unknown := sorted(set(line) - known):
        raise ValueError(f"{unknown[0]!r} is not known, only {', '.join(sorted(known))}")
    if op not in OPS:
        raise ValueError(f"op={op!r} must be one of {', '.join(OPS)}")
    if absent := [field for field in OPS[op] if not isinstance(tile.get(field), int)]:
        raise ValueError(f"tile needs the number {absent[0]!r}")
    # Tiles of the Hopper kernels have optional fields (`HopperTile`, `DecodeTile`).
    optional = op.startswith("hopper_")
    if unknown := [] if optional else sorted(set(tile) - set(OPS[op])):
        raise ValueError(f"tile has {unknown[0]!r}, which tiles of {op} do not have")
    for field in ("block_m", "block_n", "num_warps"):
        if field in tile and (tile[field] < 1 or tile[field] & (tile[field] - 1)):
            raise ValueError(f"tile has {field}={tile[field]}, which must be a power of two")
    for field in ("num_stages", "stages"):
        if field in tile and not 1 <= tile[field] <= 8:
            raise ValueError(f"tile has {field}={tile[field]}, which must be in [1, 8]")
    if line["provenance"] not in provenances:
        raise ValueError(
            f"provenance {line['provenance']!r} is not one of {', '.join(map(repr, provenances))}"
        )
    return TileEntry(
        op,
        _choices(line, "products", PRODUCTS),
        _choices(line, "elements", ELEMENTS),
        tuple((name, *_range(name, line[name])) for name in CONDITIONS if name in line),
        tuple(tile.items()),
        line["provenance"],
        int(line.get("spills", 0)),
    )


def _choices(line: Mapping[str, Any], name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    choices = tuple(line.get(name, ()))
    if unknown := [choice for choice in choices if choice not in known]:
        raise ValueError(f"{name} has {unknown[0]!r}, which must be one of {', '.join(known)}")
    return choices


def _range(name: str, bounds: Any) -> tuple[int | None, int | None]:
    least, most = bounds
    for bound in (least, most):
        if bound is not None and not isinstance(bound, int):
            raise ValueError(f"{name}={bounds!r} must be [least, most], integers or null")
    if name == "keys_per_sm":
        # Work classes are powers of 4: any other bound would split a class.
        for bound in (least - 1 if least else None, most):
            if bound is not None and (
                bound < 1 or bound & (bound - 1) or bound.bit_length() % 2 == 0
            ):
                raise ValueError(
                    f"keys_per_sm={bounds!r} must end at a power of 4, and begin at 0 or at a "
                    "power of 4 plus 1"
                )
    return least, most
