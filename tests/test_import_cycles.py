"""No modules import each other in a circle, also not by imports inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "attnlib"


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under TYPE_CHECKING, which never run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from (other, *_statements(other))
            continue
        yield node
        yield from _statements(node)


def _targets(source: str, modules: set[str]) -> set[str]:
    """The modules that a source imports: at its top, in functions, or by `import_module`."""
    found = set()
    for node in _statements(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from package import module` imports the module; other names are of the package.
            given = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in given]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            first = node.args[0]
            names = [first.value] if isinstance(first, ast.Constant) else []
        found |= {name for name in names if name in modules}
    return found


def imports_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports, by the source of each. `attnlib` itself is left out: it
    imports public names and debugging tools when they are asked for."""
    return {
        name: _targets(source, set(sources)) - {"attnlib"}
        for name, source in sources.items()
        if name != "attnlib"
    }


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others, by what `imports_of`
    returns."""
    reached: dict[str, set[str]] = {}
    for start in imports:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in imports[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        reached[start] = seen
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in imports
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def test_no_modules_import_each_other() -> None:
    sources = {_module_name(path): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert circles(imports_of(sources)) == []


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ("from p.one import f", [["p.one", "p.two"]]),
        ("def g():\n    from p import one", [["p.one", "p.two"]]),
        ("def g():\n    import_module('p.one')", [["p.one", "p.two"]]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.one import f", []),
        ("import p.three", []),
    ],
)
def test_circles_are_found(second: str, expected: list[list[str]]) -> None:
    """Also those that close when a function runs."""
    sources = {"p.one": "from p.two import g", "p.two": second, "p.three": ""}
    assert circles(imports_of(sources)) == expected
