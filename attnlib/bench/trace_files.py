"""Files of FlashInfer-Bench trace sets: definitions and workloads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnlib.bench.trace_set import Definition, Workload
from attnlib.errors import ContractError

__all__ = ["read_definitions", "read_workloads"]


def read_definitions(root: Path) -> dict[str, Definition]:
    """Name -> definition of every file under `definitions` of a trace set.

    Raises:
        ContractError: the folder has no definitions, or a file is none.
    """
    files = sorted((root / "definitions").rglob("*.json"))
    if not files:
        raise ContractError(
            f"{root} has no definitions/*.json: pass the root folder of a FlashInfer-Bench trace "
            "set, or a file below its folder workloads"
        )
    return {found.name: found for found in map(Definition.read, files)}


def read_workloads(path: Path) -> Iterator[Workload | str]:
    """The workloads of a trace set or of one of its JSONL files.

    Yields:
        A workload of a kernel that attnlib computes, or why a definition is left out.

    Raises:
        ContractError: no trace set, or a line that is not a workload.
    """
    root = path if path.is_dir() else _root_of(path)
    definitions = read_definitions(root)
    files = sorted((root / "workloads").rglob("*.jsonl")) if path.is_dir() else [path]
    left_out: set[str] = set()
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if not line.strip():
                continue
            name, uuid, axes, inputs = _parse(line, file, number)
            definition = definitions.get(name)
            reason = (
                f"{root / 'definitions'} does not define it"
                if definition is None
                else definition.unsupported_reason
            )
            if definition is not None and not reason:
                yield Workload(definition, uuid, axes, inputs, root)
            elif name not in left_out:
                left_out.add(name)
                yield f"{name}: {reason}"


def _root_of(file: Path) -> Path:
    if not file.is_file():
        raise ContractError(f"{file} does not exist: pass a trace set or a workload file")
    for folder in file.resolve().parents:
        if (folder / "definitions").is_dir():
            return folder
    raise ContractError(f"no folder above {file} has definitions: keep the file in its trace set")


def _parse(line: str, file: Path, number: int) -> tuple[str, str, dict[str, int], dict[str, Any]]:
    try:
        data = json.loads(line)
        workload = data["workload"]
        axes = {name: int(size) for name, size in workload["axes"].items()}
        inputs = {name: dict(given) for name, given in workload["inputs"].items()}
        return str(data["definition"]), str(workload["uuid"]), axes, inputs
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContractError(
            f"{file}, line {number} is not a FlashInfer-Bench workload "
            f"({type(error).__name__}: {error})"
        ) from error
