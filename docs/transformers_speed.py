"""The table of speeds in docs/guides/hugging-face.md, from result files.

A marker names patterns of files below benchmarks/results:

    <!-- speed: h200/generate*.json generate_overhead.json -->   ...   <!-- end of speed -->

Each file of `benchmarks/gpu/generate.py` or `benchmarks/generate_overhead.py` that a pattern finds
adds its models as columns to the table of its chip. A row that several files have shows all their
results, in the order of the files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["MARKED", "fill", "table"]

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results"
MARKED = re.compile(r"(?<=<!-- speed: )([^>]+?) -->\n.*?(?=<!-- end of speed -->)", re.S)
SHORT = {"flash_attention_2": "FA2", "flash_attention_3": "FA3"}


def fill(page: str, folder: Path = FOLDER) -> str:
    """The page with the tables of its markers."""
    return MARKED.sub(lambda match: f"{match[1]} -->\n\n{table(match[1].split(), folder)}\n", page)


def table(patterns: list[str], folder: Path = FOLDER) -> str:
    """A table for each chip, with a column for each model, and a line for each file.

    Args:
        patterns: of files below `folder`.
        folder: the folder of results.
    """
    chips: dict[str, dict[str, dict[str, str]]] = {}  # chip -> row -> model -> cell
    sources: dict[str, dict[str, list[str]]] = {}  # chip -> versions -> lines
    for path in (path for pattern in patterns for path in sorted(folder.glob(pattern))):
        document = json.loads(path.read_text())
        chip = document.get("gpu") or f"{document['cpu']}, {document['threads']} thread"
        for label, found in _rates(document).items():
            model, row = label
            cells = chips.setdefault(chip, {}).setdefault(row, {})
            cells[model] = "; ".join(filter(None, [cells.get(model), _cell(found)]))
        versions = f"torch {document['torch']}, transformers {document['transformers']}"
        lines = sources.setdefault(chip, {}).setdefault(versions, [])
        lines.append(_source(path.relative_to(folder), document))
    return "\n".join(_table(chip, rows, sources[chip]) for chip, rows in chips.items())


def _table(chip: str, rows: dict[str, dict[str, str]], sources: dict[str, list[str]]) -> str:
    models = list(dict.fromkeys(model for cells in rows.values() for model in cells))
    lines = [f"| {chip} | " + " | ".join(models) + " |", "|---|" + "---|" * len(models)]
    for row, cells in rows.items():
        lines.append(f"| {row} | " + " | ".join(cells.get(model, "") for model in models) + " |")
    for versions, files in sources.items():
        lines += ["", f"With {versions}:", "", *files]
    return "\n".join(lines) + "\n"


def _rates(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, float | None]]:
    """(model, row) -> implementation -> tokens per second, None where it ended with an error."""
    if "rows" not in document:  # on a CPU
        return {("tokens/s", row): dict(found) for row, found in document["results"].items()}
    found = {}
    for label, by_name in document["rows"].items():
        model, _, row = label.partition(" ")
        found[model, row] = {name: result.get("tokens_per_s") for name, result in by_name.items()}
    return found


def _cell(rates: dict[str, float | None]) -> str:
    """attnlib's tokens per second, and their ratio to those of each other implementation: the one
    that a CPU row has, of neighbors in time."""
    rate = rates.get("attnlib")
    if rate is None:
        return "failed"
    ratios = [
        f"{rates.get('ratio') or rate / other:.2f} {SHORT.get(name, name)}"
        for name, other in rates.items()
        if other is not None and name not in ("attnlib", "ratio", "rounds")
    ]
    return f"{rate:.0f}" + (f" ({', '.join(ratios)})" if ratios else "")


def _source(path: Path, document: dict[str, Any]) -> str:
    """A link to the file, which has the command, with commit and note."""
    note = f"; {document['note']}" if "note" in document else ""
    return f"- [{path}](../../benchmarks/results/{path}) at {document['commit']}{note}"
