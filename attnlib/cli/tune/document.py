"""The table as a document: read, merged with what was measured now, written after every step so that nothing is lost when time runs out."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlib.errors import ContractError
from attnlib.tuning.table import parse_tuning

__all__ = ["merged", "read_document", "write_document"]

ABOUT = "Measured by attnlib tune on this chip; auto and the tiles of the triton backend follow it. ATTNLIB_TUNING=off ignores it."


def read_document(path: Path, chip: str) -> dict[str, Any]:
    """The document at `path`, or an empty one where there is none.

    Raises:
        ContractError: what is there is another chip's table, or none.
    """
    if not path.exists():
        return {
            "about": ABOUT,
            "schema": 1,
            "chip": chip,
            "provenance": {},
            "tiles": [],
            "backends": [],
        }
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = parse_tuning(data, str(path)).chip
    except ValueError as error:  # ContractError is one
        raise ContractError(
            f"--out {path} holds no tuning table ({error}): remove it, or write to another file"
        ) from None
    if found != chip:
        raise ContractError(
            f"--out {path} holds the table of {found!r} and this is {chip!r}: write to another file"
        )
    return {"backends": [], **data}


def merged(
    document: dict[str, Any],
    name: str,
    provenance: dict[str, Any],
    tiles: Sequence[dict[str, Any]],
    backends: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The document with this run's lines, which replace older ones about the same; provenances that nothing refers to any more are dropped."""
    fresh = {_about(line) for line in tiles}
    layers = [line["layer"] for line in backends]
    lines = [*tiles, *(line for line in document["tiles"] if _about(line) not in fresh)]
    ranks = [*backends, *(line for line in document["backends"] if line["layer"] not in layers)]
    sources = {**document["provenance"], name: provenance}
    used = {line["provenance"] for line in (*lines, *ranks)}
    return {
        **document,
        "provenance": {key: value for key, value in sources.items() if key in used},
        "tiles": lines,
        "backends": ranks,
    }


def _about(line: dict[str, Any]) -> str:
    """What a line of tiles is about, work left out: a family is measured, and replaced, as a whole."""
    return json.dumps(
        [
            line["op"],
            *(
                line.get(name)
                for name in ("products", "elements", "head_size", "rows", "block_size", "visible")
            ),
        ]
    )


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write it whole or not at all: a reader never meets half a table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parse_tuning(document, str(path))  # what cannot be read is not written
    scratch = path.with_suffix(f".{os.getpid()}.part")
    scratch.write_text(_text(document), encoding="utf-8")
    scratch.replace(path)


def _text(document: dict[str, Any]) -> str:
    """JSON with one line for each line of the table, for readers and for diffs."""
    parts = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            rows = ",\n    ".join(json.dumps(row) for row in value)
            parts.append(f"  {json.dumps(key)}: [\n    {rows}\n  ]")
        elif isinstance(value, dict) and value:
            rows = ",\n    ".join(
                f"{json.dumps(name)}: {json.dumps(item)}" for name, item in value.items()
            )
            parts.append(f"  {json.dumps(key)}: {{\n    {rows}\n  }}")
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
