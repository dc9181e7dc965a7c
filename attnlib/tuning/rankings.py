"""Orders of backends that come with attnlib, for chips on which its own bench was run: what auto follows before you have measured.

One table for each chip, `tables/*.json`, in the form of `attnlib tune`'s, without tiles (those ship with the kernels). They hold for the chip that
they were measured on and for no other, however alike. `benchmarks/ship_rankings.py` writes them from a result of `attnlib bench`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from attnlib import env
from attnlib.device import DeviceInfo
from attnlib.spec import AttentionSpec
from attnlib.tuning.layers import layer_class
from attnlib.tuning.store import chip_name
from attnlib.tuning.table import Ranking, parse_ranking

__all__ = ["shipped_ranking", "shipped_rankings"]

_TABLES = Path(__file__).with_name("tables")


@functools.cache
def shipped_rankings(chip: str) -> tuple[Ranking, ...]:
    """All orders that come with attnlib for a chip, by the driver's name of it; read once, when somebody first asks."""
    found: list[Ranking] = []
    for path in sorted(_TABLES.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["chip"] == chip:
            found += [
                parse_ranking(line, f"attnlib's own table of the {chip}, tuning/tables/{path.name}")
                for line in data["backends"]
            ]
    return tuple(found)


def shipped_ranking(spec: AttentionSpec, device: DeviceInfo) -> Ranking | None:
    """The order for layers like `spec` on this very chip; None when none like it was measured, and with ATTNLIB_TUNING=off."""
    chip = chip_name(device)
    if chip is None or env.read("ATTNLIB_TUNING").lower() == "off":
        return None
    kind = layer_class(spec)
    return next((ranking for ranking in shipped_rankings(chip) if ranking.layer == kind), None)
