"""A tuning table as data: the tiles' part is read by `ops.triton.tile_tables`, the backends' part here.

    "backends": [{"layer": {...as layer_class gives it...}, "ranking": ["triton", "flash_attn"],
                  "relative": {"triton": 1.0, "flash_attn": 1.13}, "microseconds": {CASE: {NAME: 12.5}},
                  "left_out": {NAME: why}, "provenance": NAME}]

`relative` is the geometric mean over the cases of a backend's time by the fastest one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlib.errors import ContractError
from attnlib.ops.triton.heuristics.hopper_tiles import DecodeTile, HopperTile
from attnlib.ops.triton.heuristics.tile_table import TileTable, parse_table
from attnlib.spec import AttentionSpec
from attnlib.tuning.layers import layer_class

__all__ = ["Ranking", "Tuning", "parse_ranking", "parse_tuning"]


@dataclass(frozen=True)
class Ranking:
    """Backends in the order that was measured for one kind of layer.

    Attributes:
        layer: the kind, from `layer_class`.
        order: names, fastest first; each has passed the gate on every case.
        relative: name -> time by the fastest one's, 1.0 and up.
        source: the table it is from.
    """

    layer: Mapping[str, Any]
    order: tuple[str, ...]
    relative: Mapping[str, float]
    source: str

    def told(self, name: str) -> str | None:
        """What the table says of a backend, in words; None when it says nothing."""
        if name not in self.order:
            return None
        if name == self.order[0]:
            return f"measured fastest of {', '.join(self.order)} for such layers on this chip: {self.source}"
        return f"measured at {self.relative[name]:.2f} x the time of {self.order[0]}"


@dataclass(frozen=True, eq=False)
class Tuning:
    """One chip's table.

    Attributes:
        source: the file it was read from.
        chip: the chip it was measured on.
        tiles: its tiles.
        rankings: one for each kind of layer.
    """

    source: str
    chip: str
    tiles: TileTable
    rankings: tuple[Ranking, ...] = field(default=())

    def ranking(self, spec: AttentionSpec) -> Ranking | None:
        """The order of backends for layers like `spec`, None when none like it was measured."""
        kind = layer_class(spec)
        return next((ranking for ranking in self.rankings if ranking.layer == kind), None)


_HOPPER = {"hopper_prefill": HopperTile, "hopper_decode": DecodeTile}


def parse_tuning(data: Any, source: str) -> Tuning:
    """A table from its JSON.

    Raises:
        ContractError: not a table; the message names the file, the entry and what is wrong with it.
    """
    tiles = parse_table(data, source)
    for index, entry in enumerate(tiles.entries):
        if entry.op in _HOPPER:
            try:
                _HOPPER[entry.op](**dict(entry.tile))
            except TypeError as error:
                raise ContractError(
                    f"tile table {source}, tiles[{index}]: {error}; write the table anew with attnlib tune"
                ) from None
    rankings = []
    for index, line in enumerate(data.get("backends", [])):
        try:
            rankings.append(parse_ranking(line, source))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ContractError(
                f"tuning table {source}, backends[{index}]: {what}; correct it or write the table anew with attnlib tune"
            ) from None
    return Tuning(source, tiles.chip, tiles, tuple(rankings))


def parse_ranking(line: Mapping[str, Any], source: str) -> Ranking:
    """One line of a table's `backends`.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: not such a line.
    """
    order, relative = line["ranking"], line["relative"]
    if (
        not isinstance(order, Sequence)
        or isinstance(order, str)
        or not order
        or not all(isinstance(name, str) for name in order)
    ):
        raise ValueError(f"ranking={order!r} must be a list of names, fastest first")
    if len(set(order)) < len(order):
        raise ValueError(f"ranking={order!r} names a backend twice")
    numbers = {name: float(relative[name]) for name in order}
    return Ranking(dict(line["layer"]), tuple(order), numbers, source)
