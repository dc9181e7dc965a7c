"""Write the rankings that ship with attnlib, from results of `attnlib bench`.

    python benchmarks/ship_rankings.py

A backend is ranked if it was correct and timed on every case of a class of layers. Each result must
have one run, because ratios are never taken between runs; a class is ranked by the first result of
its chip that has it. Writes attnlib/tuning/tables/CHIP.json; a test fails if it does not match the
committed results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlib.bench.results import read_document
from attnlib.tuning.measure import rank_rows

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "attnlib" / "tuning" / "tables"
RESULTS = ROOT / "benchmarks" / "results"

SOURCES = {
    "nvidia-h100-80gb-hbm3": ("h100/bench.json",),
    "nvidia-h200": ("h200/bench.json", "h200/slow_rows.json", "h200/coverage.json"),
}
"""Table -> results of its chip."""


def table_of(sources: Sequence[str]) -> dict[str, Any]:
    """The table as a JSON value.

    Args:
        sources: paths in RESULTS, of one chip.

    Raises:
        SystemExit: a result with several runs, without a GPU, or of another chip.
    """
    provenance: dict[str, str] = {}
    ranked: dict[str, dict[str, Any]] = {}
    chip, capability = "", [9, 0]
    for source in sources:
        document, name = read_document(RESULTS / source), Path(source).stem
        if len(document.runs) != 1 or "gpu" not in document.runs[0].provenance:
            raise SystemExit(f"{source} has {len(document.runs)} runs: it needs one run on a GPU")
        facts = document.runs[0].provenance
        if chip not in ("", facts["gpu"]):
            raise SystemExit(f"{source} was measured on {facts['gpu']}, not on {chip}")
        chip, capability = facts["gpu"], facts.get("capability", capability)
        words = [
            chip,
            *(f"{fact} {facts[fact]}" for fact in ("driver", "torch", "triton", "commit")),
            facts["date"],
        ]
        provenance[name] = f"{', '.join(words)}: {facts['command']}"
        for line in rank_rows(document.rows, name):
            ranked.setdefault(json.dumps(line["layer"]), line)
    return {
        "about": "Rankings of backends for each measured class of layers; automatic selection uses "
        "them on this chip unless a table of attnlib tune has its own.",
        "schema": 1,
        "chip": chip,
        "capability": capability,
        "provenance": provenance,
        "backends": list(ranked.values()),
    }


def text_of(table: dict[str, Any]) -> str:
    """JSON with one line for each class of layers, for readable diffs."""
    head = json.dumps({key: value for key, value in table.items() if key != "backends"}, indent=1)[
        :-2
    ]
    lines = ",\n".join("  " + json.dumps(line) for line in table["backends"])
    return f'{head},\n "backends": [\n{lines}\n ]\n}}\n'


def main() -> None:
    """Write every table."""
    for name, sources in SOURCES.items():
        table = table_of(sources)
        (TABLES / f"{name}.json").write_text(text_of(table), encoding="utf-8")
        print(f"{name}: {len(table['backends'])} rankings")


if __name__ == "__main__":
    main()
