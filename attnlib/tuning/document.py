"""The JSON document of a tuning table while it is measured: read, merged with new lines, written
after every step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlib.errors import ContractError
from attnlib.tuning.table import SCHEMA, parse_tuning

__all__ = ["merged", "read_document", "write_document"]

ABOUT = (
    "Measured by attnlib tune on this chip. Automatic selection and backends with tunable "
    "parameters use it; ATTNLIB_TUNING=off ignores it."
)
Lines = Sequence[Mapping[str, Any]]


def read_document(path: Path, chip: str) -> dict[str, Any]:
    """The document at `path`, or an empty one if the file does not exist.

    Raises:
        ContractError: the file is not a tuning table, or one of another chip.
    """
    empty = {
        "about": ABOUT,
        "schema": SCHEMA,
        "chip": chip,
        "provenance": {},
        "parameters": {},
        "backends": [],
    }
    if not path.exists():
        return empty
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = parse_tuning(data, str(path))
    except ValueError as error:  # ContractError is a ValueError
        raise ContractError(
            f"--out {path} is not a tuning table ({error}): remove it, or write to another file"
        ) from None
    if found.chip != chip:
        raise ContractError(
            f"--out {path} is the table of {found.chip!r} and this is {chip!r}: write to another "
            "file"
        )
    rest = {key: value for key, value in data.items() if key in empty}
    return {**empty, **rest, "parameters": dict(found.parameters)}


def merged(
    document: Mapping[str, Any],
    name: str,
    provenance: Mapping[str, Any],
    backend_lines: Mapping[str, Lines] | None = None,
    rankings: Lines = (),
    line_keys: Mapping[str, Callable[[Mapping[str, Any]], Hashable]] | None = None,
) -> dict[str, Any]:
    """The document with the lines of one run; they replace older lines with the same key.

    Args:
        document: the document before this run.
        name: the name of this run, which the new lines carry as `provenance`.
        provenance: its description. Descriptions that no line refers to are dropped.
        backend_lines: backend name -> new parameter lines.
        rankings: new rankings; they replace those of equal layer classes.
        line_keys: backend name -> `Tuner.line_key`, for each backend in `backend_lines`.
    """
    parameters: dict[str, list[Mapping[str, Any]]] = dict(document["parameters"])
    for backend, lines in (backend_lines or {}).items():
        line_key = (line_keys or {})[backend]
        fresh = {line_key(line) for line in lines}
        old = [line for line in parameters.get(backend, ()) if line_key(line) not in fresh]
        parameters[backend] = [*lines, *old]
    layers = [line["layer"] for line in rankings]
    ranks = [*rankings, *(line for line in document["backends"] if line.get("layer") not in layers)]
    sources = {**document["provenance"], name: provenance}
    used = {line.get("provenance") for lines in (*parameters.values(), ranks) for line in lines}
    return {
        **document,
        "provenance": {key: value for key, value in sources.items() if key in used},
        "parameters": parameters,
        "backends": ranks,
    }


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document atomically, so that a reader never sees a part of a table.

    Raises:
        ContractError: the document is not a valid table.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    parse_tuning(document, str(path))
    scratch = path.with_suffix(f".{os.getpid()}.part")
    scratch.write_text(_text(document), encoding="utf-8")
    scratch.replace(path)


def _text(document: Mapping[str, Any]) -> str:
    """JSON with each table line on one line, for readable diffs."""
    return "{\n" + ",\n".join(_item(key, value, "  ") for key, value in document.items()) + "\n}\n"


def _item(key: str, value: Any, indent: str) -> str:
    head, inner = f"{indent}{json.dumps(key)}: ", indent + "  "
    if isinstance(value, list) and value:
        rows = ",\n".join(inner + json.dumps(row) for row in value)
        return f"{head}[\n{rows}\n{indent}]"
    if isinstance(value, Mapping) and value and len(indent) < 4:
        rows = ",\n".join(_item(name, each, inner) for name, each in value.items())
        return f"{head}{{\n{rows}\n{indent}}}"
    return head + json.dumps(value)
