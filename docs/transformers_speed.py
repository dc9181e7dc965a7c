"""The table of speeds in docs/guides/hugging-face.md, from result files.

A marker names patterns of files below benchmarks/results:

    <!-- speed: h200/generate*.json generate_overhead.json -->   ...   <!-- end of speed -->

Each file of `benchmarks/gpu/generate.py` or `benchmarks/generate_overhead.py` that a pattern finds
adds its models as columns to the table of its chip and versions. A row that several files have
shows all their results, in the order of the files.
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
    """A table for each chip and its versions, with a column for each model, and a line for each
    file.

    Args:
        patterns: of files below `folder`.
        folder: the folder of results.
    """
    tables: dict[tuple[str, str], dict[str, dict[str, str]]] = {}  # -> row -> model -> cell
    sources: dict[tuple[str, str], list[str]] = {}
    for path in (path for pattern in patterns for path in sorted(folder.glob(pattern))):
        document = json.loads(path.read_text())
        chip = document.get("gpu") or f"{document['cpu']}, {document['threads']} thread"
        place = chip, f"torch {document['torch']}, transformers {document['transformers']}"
        for (model, row), found in _rates(document).items():
            cells = tables.setdefault(place, {}).setdefault(row, {})
            cells[model] = "; ".join(filter(None, [cells.get(model), _cell(found)]))
        sources.setdefault(place, []).append(_source(path.relative_to(folder), document))
    return "\n".join(_table(*place, rows, sources[place]) for place, rows in tables.items())


def _table(chip: str, versions: str, rows: dict[str, dict[str, str]], files: list[str]) -> str:
    models = list(dict.fromkeys(model for cells in rows.values() for model in cells))
    lines = [f"| {chip} | " + " | ".join(models) + " |", "|---|" + "---|" * len(models)]
    for row, cells in rows.items():
        lines.append(f"| {row} | " + " | ".join(cells.get(model, "") for model in models) + " |")
    return "\n".join([*lines, "", f"With {versions}:", "", *files]) + "\n"


def _rates(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """(model, row) -> implementation -> tokens per second, and the ratio of attnlib's to them where
    the file has one, of neighbors in time; nothing for an implementation that failed."""
    if "rows" not in document:  # on a CPU, with one other implementation
        return {
            ("tokens/s", row): {
                name: {"tokens_per_s": rate, "ratio": found["ratio"]}
                for name, rate in found.items()
                if name not in ("ratio", "rounds")
            }
            for row, found in document["results"].items()
        }
    found = {}
    for label, by_name in document["rows"].items():
        model, _, row = label.partition(" ")
        found[model, row] = {
            name: result for name, result in by_name.items() if "tokens_per_s" in result
        }
    return found


def _cell(found: dict[str, dict[str, Any]]) -> str:
    """attnlib's tokens per second, and their ratio to those of each other implementation."""
    if "attnlib" not in found:
        return "failed"
    rate = found["attnlib"]["tokens_per_s"]
    ratios = [
        f"{result.get('ratio') or rate / result['tokens_per_s']:.2f} {SHORT.get(name, name)}"
        for name, result in found.items()
        if name != "attnlib"
    ]
    return f"{rate:.0f}" + (f" ({', '.join(ratios)})" if ratios else "")


def _source(path: Path, document: dict[str, Any]) -> str:
    """A link to the file, which has the command, with commit and note."""
    note = f"; {document['note']}" if "note" in document else ""
    return f"- [{path}](../../benchmarks/results/{path}) at {document['commit']}{note}"
