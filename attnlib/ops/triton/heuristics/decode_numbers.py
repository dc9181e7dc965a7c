"""Numbers of decode that are no tiles: limits of splitting, and lengths from which another kernel is the quicker one.

They stand in `tables/decode.json`, a file of the form of the tile tables with lines of its own, so that every number
tells where it comes from, and whether it was measured at all:

    "numbers": [{"name": "split_limit", "value": 256, "meaning": what it bounds, "provenance": NAME,
                 "measured": {CASE: {"hopper_us": 6.9, "plain_us": 7.8}}}]

Imports no triton: the card of the backend asks for them too. One small file, read once, when `splits` or
`hopper.limits` is imported.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attnlib.errors import ContractError

__all__ = ["DecodeNumber", "decode_numbers", "parse_numbers", "shipped_numbers"]

_FILE = Path(__file__).with_name("tables") / "decode.json"
_FIELDS = {"name", "value", "meaning", "provenance", "measured"}


@dataclass(frozen=True)
class DecodeNumber:
    """One line of the table.

    Attributes:
        name: what the code calls it.
        value: at least 1.
        meaning: what it bounds, and why there is a bound.
        provenance: where the value comes from.
    """

    name: str
    value: int
    meaning: str
    provenance: str


@functools.cache
def decode_numbers() -> Mapping[str, int]:
    """Name -> value, of the numbers that ship."""
    return MappingProxyType({number.name: number.value for number in shipped_numbers()})


def shipped_numbers() -> tuple[DecodeNumber, ...]:
    """The lines of the package's own table."""
    return parse_numbers(json.loads(_FILE.read_text(encoding="utf-8")), str(_FILE))


def parse_numbers(data: Mapping[str, Any], name: str) -> tuple[DecodeNumber, ...]:
    """The numbers of a table from its JSON.

    Raises:
        ContractError: a line that is not whole; the message names the table, the line and what is wrong with it.
    """
    found: dict[str, DecodeNumber] = {}
    for index, line in enumerate(data["numbers"]):
        try:
            number = _number(line, data["provenance"])
            if number.name in found:
                raise ValueError(f"{number.name!r} stands there twice")
        except (KeyError, ValueError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ContractError(
                f"decode table {name}, numbers[{index}]: {what}; correct it, or install attnlib anew"
            ) from None
        found[number.name] = number
    return tuple(found.values())


def _number(line: Mapping[str, Any], sources: Mapping[str, Any]) -> DecodeNumber:
    if strangers := sorted(set(line) - _FIELDS):
        raise ValueError(f"{strangers[0]!r} is not known, only {', '.join(sorted(_FIELDS))}")
    value = line["value"]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"value={value!r} must be a whole number of at least 1")
    if line["provenance"] not in sources:
        raise ValueError(
            f"provenance {line['provenance']!r} is not among {', '.join(map(repr, sources))}"
        )
    return DecodeNumber(line["name"], value, line["meaning"], line["provenance"])
