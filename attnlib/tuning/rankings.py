"""Rankings of backends that ship with attnlib, for the chips on which its benchmark was run.

`tables/*.json` holds one table per chip in the format of `attnlib.tuning.table`. A ranking applies
to the chip that it was measured on and to no other. `benchmarks/ship_rankings.py` writes the tables
from results of `attnlib bench`.
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


@functools.lru_cache(maxsize=16)
def shipped_rankings(chip: str) -> tuple[Ranking, ...]:
    """All shipped rankings for a chip, by the driver's name of it.

    Files are read once, on first use.
    """
    found: list[Ranking] = []
    for path in sorted(_TABLES.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["chip"] == chip:
            source = f"attnlib's own table of the {chip}, tuning/tables/{path.name}"
            found += [parse_ranking(line, source) for line in data["backends"]]
    return tuple(found)


def shipped_ranking(spec: AttentionSpec, device: DeviceInfo) -> Ranking | None:
    """The shipped ranking for layers like `spec` on this chip.

    Returns None if there is none, or if ATTNLIB_TUNING=off.
    """
    chip = chip_name(device)
    if chip is None or env.read("ATTNLIB_TUNING").lower() == "off":
        return None
    layer = layer_class(spec)
    return next((ranking for ranking in shipped_rankings(chip) if ranking.layer == layer), None)
