"""Arrows point one way: imports are read from the source and held against the floors of docs/architecture.md."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "attnlib"

FLOORS = (
    ("errors", "env", "device", "compile.objects"),
    ("kv_dtype", "spec", "sizes", "capabilities"),
    ("ops",),
    ("cache", "workspace", "tuning"),
    ("metadata",),
    ("backends.base", "backends.builtin", "backends._foreign"),
    ("backends",),
    ("selection",),
    ("settled", "layer", "compile", "debug.validation", "warmup"),
    ("integrations", "debug", "testing", "cli", "bench", "tuning.measure", "__main__", "__init__"),
)


def _floor(module: str) -> int:
    """Index of the floor of `module` (a dotted name below attnlib); the longest matching room wins."""
    matches = [
        (len(room), index)
        for index, rooms in enumerate(FLOORS)
        for room in rooms
        if module == room or module.startswith(f"{room}.")
    ]
    assert matches, (
        f"attnlib.{module} stands on no floor: put it in FLOORS and in docs/architecture.md"
    )
    return max(matches)[1]


def _imports(tree: ast.AST) -> set[str]:
    """Modules below attnlib that a source imports, inside functions too; imports for type checkers only do not count."""
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If)
        and isinstance(block.test, ast.Name)
        and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "attnlib"
        ):
            base = node.module.partition(".")[2]
            found |= {base} if base else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.startswith("attnlib.")
            }
    return found - {""}


def violations(name: str, source: str) -> list[str]:
    """What is wrong with the imports of module `name` (dotted, below attnlib)."""
    wrong = []
    for target in sorted(_imports(ast.parse(source))):
        if target == "__version__":
            continue
        here, there = _floor(name), _floor(target)
        if there > here:
            wrong.append(f"{name} imports {target} (floor {here} -> {there})")
        mine, other = name.split("."), target.split(".")
        if (
            mine[0] == other[0] == "ops"
            and len(mine) > 2
            and len(other) > 1
            and other[1] in ("torch", "triton")
            and mine[1] != other[1]
        ):
            wrong.append(f"{name} imports its twin {target}")
        siblings = mine[0] == other[0] == "backends" and here == there and mine[1] != "composite"
        if siblings and mine[1] != other[1]:
            wrong.append(f"{name} imports its sibling {target}")
    return wrong


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_arrows_point_down(path: Path) -> None:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    if name == "__init__":
        return  # the face of the package names everything, lazily
    assert not violations(name, path.read_text())


def test_ops_see_no_spec() -> None:
    for path in (PACKAGE / "ops").rglob("*.py"):
        assert not {
            m for m in _imports(ast.parse(path.read_text())) if not m.startswith(("ops", "errors"))
        }, path


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        (
            "backends.triton.impl",
            "from attnlib.selection import explain",
            "backends.triton.impl imports selection (floor 6 -> 7)",
        ),
        (
            "cache.table",
            "def f():\n    import attnlib.metadata.common",
            "cache.table imports metadata.common (floor 3 -> 4)",
        ),
        (
            "backends.torch.impl",
            "from attnlib.backends.triton.impl import X",
            "backends.torch.impl imports its sibling backends.triton.impl",
        ),
        (
            "ops.triton.slots",
            "from attnlib.ops.torch.slots import x",
            "ops.triton.slots imports its twin ops.torch.slots",
        ),
    ],
)
def test_the_check_can_fail(name: str, source: str, message: str) -> None:
    assert violations(name, source) == [message]


def test_type_checking_imports_do_not_count() -> None:
    assert (
        violations(
            "spec",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from attnlib.layer import Attention",
        )
        == []
    )
