"""Write the rankings that ship with attnlib for a chip, from a result of `attnlib bench` on it.

    python benchmarks/ship_rankings.py benchmarks/results/h200/bench.json

A backend is ranked if it was correct and timed on every case of a class of layers. The result must
have one run, because ratios are never taken between runs. Writes attnlib/tuning/tables/CHIP.json; a
test fails if it does not match the committed result.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from attnlib.bench.results import Document, read_document
from attnlib.tuning.measure import rank_rows

TABLES = Path(__file__).resolve().parents[1] / "attnlib" / "tuning" / "tables"


def table_of(document: Document) -> dict[str, Any]:
    """The table as a JSON value.

    Raises:
        SystemExit: the document has several runs, or no GPU.
    """
    if len(document.runs) != 1 or "gpu" not in document.runs[0].provenance:
        raise SystemExit(f"{len(document.runs)} runs: give the result of one run on a GPU")
    facts = document.runs[0].provenance
    words = [
        facts["gpu"],
        *(f"{name} {facts[name]}" for name in ("driver", "torch", "triton", "commit")),
        facts["date"],
    ]
    return {
        "about": "Rankings of backends for each measured class of layers; automatic selection uses "
        "them on this chip unless a table of attnlib tune has its own.",
        "schema": 1,
        "chip": facts["gpu"],
        "capability": facts.get("capability", [9, 0]),
        "provenance": {"bench": f"{', '.join(words)}: {facts['command']}"},
        "backends": rank_rows(document.rows, "bench"),
    }


def text_of(table: dict[str, Any]) -> str:
    """JSON with one line for each class of layers, for readable diffs."""
    head = json.dumps({key: value for key, value in table.items() if key != "backends"}, indent=1)[
        :-2
    ]
    lines = ",\n".join("  " + json.dumps(line) for line in table["backends"])
    return f'{head},\n "backends": [\n{lines}\n ]\n}}\n'


def main(paths: list[str]) -> int:
    """Write one table for each result."""
    for path in paths:
        table = table_of(read_document(path))
        target = TABLES / (re.sub(r"[^a-z0-9]+", "-", table["chip"].lower()).strip("-") + ".json")
        target.write_text(text_of(table), encoding="utf-8")
        print(f"wrote {len(table['backends'])} rankings to {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
