"""Write the rankings and tiles that ship with attnlib, from results of `attnlib bench` and
`attnlib tune`.

    python benchmarks/ship_rankings.py

A built-in backend is ranked if it was correct and timed on every case of a class of layers; labels
with settings and backends given by a path are not ranked. Each result must have one run, because
ratios are never taken between runs. A class is ranked by the result of its chip that ranks most
backends of it, the first one among equals, and not at all if no result ranks two. A tile is shipped
for a chip if it was faster there than the tile of the common tables. Writes
attnlib/tuning/tables/CHIP.json, either all tables or, after an error, none; a test fails if a table
does not match the committed results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlib.backends.builtin import BUILTIN_BACKENDS
from attnlib.bench.results import read_document
from attnlib.tuning.rank import rank_rows

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "attnlib" / "tuning" / "tables"
RESULTS = ROOT / "benchmarks" / "results"

SOURCES = {
    "nvidia-h100-80gb-hbm3": (
        "h100/bench.json",
        "h100/coverage.json",
        "h100/slow_rows.json",
        "h100/float8_decodes.json",
    ),
    "nvidia-h200": (
        "h200/bench.json",
        "h200/slow_rows.json",
        "h200/coverage.json",
        "h200/float8_decodes.json",
        "h200/gaps.json",
        "h200/state_decodes.json",
    ),
}
"""Table -> results of its chip, with different file names."""

TILES = {"nvidia-h100-80gb-hbm3": "h100/tiles.json"}
"""Table -> table of `attnlib tune --backends none --out FILE` on its chip."""


def table_of(sources: Sequence[str], tiles: str | None = None) -> dict[str, Any]:
    """The table as a JSON value.

    Args:
        sources: paths in RESULTS, of one chip.
        tiles: path in RESULTS of measured tiles of the chip, if there are any.

    Raises:
        SystemExit: a result with several runs, without a GPU, or of another chip; two results with
            one file name.
        ContractError: a source that is missing or not a result of `attnlib bench`.
    """
    provenance: dict[str, str] = {}
    ranked: dict[str, dict[str, Any]] = {}
    chip, capability = "", [9, 0]
    for source in sources:
        document, name = read_document(RESULTS / source), Path(source).stem
        if name in provenance:
            raise SystemExit(f"{source}: another source is named {name}, too; rename one of them")
        if len(document.runs) != 1 or "gpu" not in document.runs[0].provenance:
            raise SystemExit(f"{source} has {len(document.runs)} runs: it needs one run on a GPU")
        facts = document.runs[0].provenance
        if chip not in ("", facts["gpu"]):
            raise SystemExit(f"{source} was measured on {facts['gpu']}, not on {chip}")
        chip, capability = facts["gpu"], facts.get("capability", capability)
        provenance[name] = _run_of(facts)
        rows = (row for row in document.rows if row.backend in BUILTIN_BACKENDS)
        for line in rank_rows(rows, name):
            known = ranked.get(json.dumps(line["layer"]))
            if len(line["ranking"]) > (len(known["ranking"]) if known else 1):
                ranked[json.dumps(line["layer"])] = line
    used = {line["provenance"] for line in ranked.values()}
    provenance = {name: run for name, run in provenance.items() if name in used}
    lines: list[dict[str, Any]] = []
    if tiles is not None:
        measured = json.loads((RESULTS / tiles).read_text(encoding="utf-8"))
        if measured["chip"] != chip:
            raise SystemExit(f"{tiles} was measured on {measured['chip']}, not on {chip}")
        lines = [line for line in measured["parameters"]["triton"] if _is_faster(line)]
        used = {line["provenance"] for line in lines}
        provenance.update((name, _run_of(measured["provenance"][name])) for name in sorted(used))
    return {
        "about": "Rankings of backends for each measured class of layers, and tiles that are "
        "faster than those of the common tables; attnlib uses them on this chip unless a table of "
        "attnlib tune has its own.",
        "schema": 1,
        "chip": chip,
        "capability": capability,
        "provenance": provenance,
        "parameters": {"triton": lines},
        "backends": list(ranked.values()),
    }


def _run_of(facts: Mapping[str, Any]) -> str:
    """Chip, versions, date and command of a run."""
    words = [
        facts["gpu"],
        *(f"{fact} {facts[fact]}" for fact in ("driver", "torch", "triton", "commit")),
        facts["date"],
    ]
    return f"{', '.join(words)}: {facts['command']}"


def _is_faster(line: Mapping[str, Any]) -> bool:
    """Whether the tile of a line of `attnlib tune` differs from the one that was in use."""
    return any(times["us"] != times["before_us"] for times in line["measured"].values())


def text_of(table: dict[str, Any]) -> str:
    """JSON with one line for each tile and each class of layers, for readable diffs."""
    lists = {"parameters": table["parameters"]["triton"], "backends": table["backends"]}
    head = json.dumps({key: table[key] for key in table if key not in lists}, indent=1)[:-2]
    tiles, ranked = (
        ",".join("\n  " + json.dumps(line) for line in lines) + "\n " * bool(lines)
        for lines in lists.values()
    )
    return f'{head},\n "parameters": {{"triton": [{tiles}]}},\n "backends": [{ranked}]\n}}\n'


def main() -> None:
    """Write every table."""
    tables = {name: table_of(sources, TILES.get(name)) for name, sources in SOURCES.items()}
    for name, table in tables.items():
        (TABLES / f"{name}.json").write_text(text_of(table), encoding="utf-8")
        tiles = len(table["parameters"]["triton"])
        print(f"{name}: {len(table['backends'])} rankings, {tiles} tiles")


if __name__ == "__main__":
    main()
