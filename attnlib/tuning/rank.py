"""Rankings of backends from rows of `attnlib bench`, one for each class of layers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attnlib.bench.case import BenchCase
from attnlib.bench.results import Row, case_of_row
from attnlib.tuning import layer_class
from attnlib.tuning.measure import geometric_mean

__all__ = ["rank_rows"]


def rank_rows(rows: Iterable[Row], provenance: str) -> list[dict[str, Any]]:
    """Rankings for a table from rows of `attnlib bench`, one for each class of layers with at least
    one time.

    Cases that permit float8 queries are left out: they are not a class of layers of a table. A
    backend is ranked if it passed the correctness check and was timed on every
    measured case of the class. Others are left out with the reason and keep the position that their
    priority gives them.
    """
    classes: dict[str, list[Row]] = {}
    for row in rows:
        case = case_of_row(row) if row.status not in ("not run", "unavailable") else None
        if case is not None and not (isinstance(case, BenchCase) and case.fp8_queries):
            classes.setdefault(json.dumps(layer_class(case.spec)), []).append(row)
    lines = [_rank(json.loads(key), members, provenance) for key, members in classes.items()]
    return [line for line in lines if line["ranking"]]


def _rank(layer: Mapping[str, Any], rows: Sequence[Row], provenance: str) -> dict[str, Any]:
    cases = list(dict.fromkeys(row.case for row in rows if row.us))
    times = {
        case: {row.backend: row.us for row in rows if row.case == case and row.us and row.checked}
        for case in cases
    }
    left_out: dict[str, str] = {}
    for row in rows:
        if row.status != "ok" or not row.us or not row.checked:
            reason = row.reason or ("no time" if row.checked else "not checked")
            left_out.setdefault(row.backend, f"{row.status} on {row.case}: {reason}")
    names = [
        name
        for name in dict.fromkeys(row.backend for row in rows)
        if name not in left_out and all(name in found for found in times.values())
    ]
    mean = {name: geometric_mean([times[case][name] for case in cases]) for name in names}
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
