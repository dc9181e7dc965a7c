"""Names that a file imports from this repository exist, also where the file does not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _file(module: str) -> Path | None:
    """The source of a module of this repository; None if there is none."""
    base = ROOT.joinpath(*module.split("."))
    return next(
        (file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None
    )


@cache
def _names(module: str) -> set[str] | None:
    """Names of a module; None for one that may compute them."""
    file = _file(module)
    if file is None:
        return set()
    found: set[str] = set()
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {each.asname or each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return None if found & {"__getattr__", "*"} else found


def missing_names(file: Path) -> Iterator[str]:
    """Imports of names that no module has."""
    for node in ast.walk(_tree(file)):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        if node.module.partition(".")[0] not in ("attnlib", "tests", "benchmarks"):
            continue
        names = _names(node.module)
        for each in node.names if names is not None else ():
            assert names is not None
            if each.name not in {*names, "*"} and _file(f"{node.module}.{each.name}") is None:
                yield f"{file.name}:{node.lineno}: {node.module} has no {each.name}"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["attnlib", "tests", "benchmarks", "examples"])
def test_imported_names_exist(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [line for file in files for line in missing_names(file)] == []


def test_a_missing_name_is_found(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("from attnlib.errors import ContractError, NoSuchError\n")
    assert list(missing_names(file)) == ["program.py:1: attnlib.errors has no NoSuchError"]
