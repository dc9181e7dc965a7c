"""From rows of `attnlib bench` to an order of backends for each kind of layer.

A backend is ranked where it passed the gate and was timed on every case of its kind of layer that was measured; one that was wrong, failed or
refused anywhere is left out with the reason, and keeps the place that its priority gives it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from attnlib.bench.case import BenchCase
from attnlib.bench.results import Row
from attnlib.testing.batch_spec import parse_batch
from attnlib.tuning import layer_class

__all__ = ["rank_rows"]


def rank_rows(rows: Iterable[Row], provenance: str) -> list[dict[str, Any]]:
    """The `backends` of a table: one line for each kind of layer with at least one case on which somebody was timed."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if row.status not in ("not run", "unavailable"):
            kinds.setdefault(json.dumps(layer_class(_case(row).spec)), []).append(row)
    lines = [_rank(json.loads(kind), members, provenance) for kind, members in kinds.items()]
    return [line for line in lines if line["ranking"]]


def _case(row: Row) -> BenchCase:
    return BenchCase(**{**row.settings, "batch": parse_batch(row.settings["batch"])})


def _rank(layer: dict[str, Any], rows: Sequence[Row], provenance: str) -> dict[str, Any]:
    cases = list(dict.fromkeys(row.case for row in rows if row.us))
    times = {
        case: {row.backend: row.us for row in rows if row.case == case and row.us and row.checked}
        for case in cases
    }
    left_out: dict[str, str] = {}
    for row in rows:
        if row.status != "ok" or not row.us or not row.checked:
            left_out.setdefault(
                row.backend,
                f"{row.status} on {row.case}: {row.reason or ('no time' if row.checked else 'not checked')}",
            )
    names = [
        name
        for name in dict.fromkeys(row.backend for row in rows)
        if name not in left_out and all(name in found for found in times.values())
    ]
    mean = {
        name: math.exp(sum(math.log(times[case][name]) for case in cases) / max(len(cases), 1))
        for name in names
    }
    order = sorted(names, key=lambda name: mean[name])
    return {
        "layer": layer,
        "ranking": order,
        "relative": {name: round(mean[name] / mean[order[0]], 3) for name in order},
        "microseconds": {
            case: {name: round(us, 2) for name, us in found.items()}
            for case, found in times.items()
        },
        "left_out": left_out,
        "provenance": provenance,
    }
