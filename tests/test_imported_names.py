"""Names that a file imports or that a message gives exist, also where the file does not run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_DOTTED = re.compile(r"\battnlib(?:\.[A-Za-z_]\w*)+")


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
def _names(file: Path | None) -> set[str] | None:
    """Names of a module; None for one that may compute them."""
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


@cache
def _attributes(module: str) -> set[str] | None:
    """Names that a module has besides those of its functions; None for one that computes them."""
    file, found = _file(module), set[str]()
    assert file is not None
    inner: list[ast.AST] = [*_tree(file).body]
    while inner:
        node = inner.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {each.asname or each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        inner += ast.iter_child_nodes(node)
    return None if found & {"__getattr__", "*"} or "globals" in file.read_text() else found


def missing_names(file: Path) -> Iterator[str]:
    """Imports of names that no module has."""
    for node in ast.walk(_tree(file)):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        beside = file.with_name(f"{node.module}.py")  # scripts import those of their folder
        if beside.is_file() and ROOT / "attnlib" not in file.parents:
            names = _names(beside)
        elif node.module.partition(".")[0] in ("attnlib", "tests", "benchmarks"):
            names = _names(_file(node.module))
        else:
            continue
        for each in node.names if names is not None else ():
            assert names is not None
            if each.name not in {*names, "*"} and _file(f"{node.module}.{each.name}") is None:
                yield f"{file.name}:{node.lineno}: {node.module} has no {each.name}"


def _imported(node: ast.AST) -> list[tuple[str, str]]:
    """(Name, module) of what an import, or `name = pytest.importorskip("module")`, gives."""
    if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
        return [(each.asname or each.name, f"{node.module}.{each.name}") for each in node.names]
    if isinstance(node, ast.Import):
        return [(each.asname, each.name) for each in node.names if each.asname is not None]
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
        function, given = node.value.func, node.value.args[0]
        called = getattr(function, "attr", getattr(function, "id", ""))
        if called in ("importorskip", "import_module") and isinstance(given, ast.Constant):
            return [(x.id, given.value) for x in node.targets if isinstance(x, ast.Name)]
    return []


def _modules(tree: ast.Module) -> dict[str, str]:
    """Names of a file that are modules of this repository, and nothing else in it."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        for name, path in _imported(node):
            module, _, last = path.rpartition(".")
            is_name = last in (_names(_file(module)) or ()) and not isinstance(node, ast.Import)
            found.setdefault(name, set()).add("" if is_name else path)
        if isinstance(node, ast.arg):
            found.setdefault(node.arg, set()).add("")
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.comprehension):
            if not _imported(node):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (x.id for t in targets for x in ast.walk(t) if isinstance(x, ast.Name)):
                    found.setdefault(name, set()).add("")
    paths = {name: next(iter(given)) for name, given in found.items() if len(given) == 1}
    return {name: path for name, path in paths.items() if path and _file(path) is not None}


def _looped(tree: ast.Module, modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Names that stand only for these modules in turn, in loops over tuples of them."""
    found: dict[str, set[str]] = {}
    stores = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and _stores(node)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.For) or not isinstance(node.iter, ast.Tuple):
            continue
        rows = [each.elts if isinstance(each, ast.Tuple) else [each] for each in node.iter.elts]
        targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
        for target, values in zip(targets, zip(*rows, strict=False), strict=False):
            names = {value.id for value in values if isinstance(value, ast.Name)}
            if isinstance(target, ast.Name) and stores.count(target.id) == 1 and names:
                if all(isinstance(value, ast.Name) for value in values) and names <= modules.keys():
                    found[target.id] = {modules[name] for name in names}
    return found


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def missing_attributes(file: Path) -> Iterator[str]:
    """Attributes of imported modules that these do not have, read or replaced by `setattr`."""
    modules = _modules(_tree(file))
    looped = _looped(_tree(file), modules)
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.args[0] if node.args and node.func.attr in ("setattr", "patch") else None
            name = target.value if isinstance(target, ast.Constant) else None
            if isinstance(name, str) and _DOTTED.fullmatch(name) and not _exists(name):
                yield f"{file.name}:{node.lineno}: there is no {name}"
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner, name = node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "setattr"
            and len(node.args) == 3
            and isinstance(node.args[1], ast.Constant)
        ):
            owner, name = node.args[0], node.args[1].value
        else:
            continue
        if not isinstance(owner, ast.Name) or name.startswith("__"):
            continue
        paths = {modules[owner.id]} if owner.id in modules else looped.get(owner.id, set())
        for path in sorted(paths):
            names = _attributes(path)
            if names is not None and name not in names and _file(f"{path}.{name}") is None:
                yield f"{file.name}:{node.lineno}: {path} has no {name}"


def _exists(name: str) -> bool:
    """Whether a dotted name is a module of this repository, or a name of one."""
    parts = name.split(".")
    cut = next(n for n in range(len(parts), 0, -1) if _file(".".join(parts[:n])) is not None)
    module = ".".join(parts[:cut])
    if cut == len(parts):
        return True
    names = _names(_file(module))
    if names is not None:
        return parts[cut] in names
    try:
        return hasattr(import_module(module), parts[cut])
    except ImportError:  # a name that another package has to provide
        return True


def unknown_names(file: Path) -> Iterator[str]:
    """Names of attnlib in texts, such as messages, that do not exist."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for name in _DOTTED.findall(node.value):
                if not _exists(name):
                    yield f"{file.name}:{node.lineno}: {name}"


@pytest.mark.slow
def test_names_in_messages_exist() -> None:
    files = sorted((ROOT / "attnlib").rglob("*.py"))
    assert files
    assert [line for file in files for line in unknown_names(file)] == []


def test_an_unknown_name_in_a_message_is_found(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    texts = ("attnlib.NoSuchFormat", "attnlib.errors.NoSuchError", "attnlib.errors.ContractError")
    file.write_text("\n".join(f'raise ValueError(f"{{1}}: make an {text}")' for text in texts))
    assert list(unknown_names(file)) == [
        "program.py:1: attnlib.NoSuchFormat",
        "program.py:2: attnlib.errors.NoSuchError",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["attnlib", "tests", "benchmarks", "examples"])
def test_imported_names_exist(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [line for file in files for line in missing_names(file)] == []
    assert [line for file in files for line in missing_attributes(file)] == []


def test_a_missing_attribute_is_found(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "from attnlib import errors, spec as given\n"
        "import attnlib.env as variables\n"
        "print(errors.ContractError, errors.NoSuchError, given.AttentionSpec, variables.raw)\n"
        "patch.setattr(variables, 'missing', None)\n"
        "patch.setattr(variables, 'raw', None)\n"
        "mock.patch('attnlib.env.missing', None)\n"
        "for module, number in ((errors, 1), (variables, 2)):\n"
        "    patch.setattr(module, 'raw', number)\n"
    )
    assert list(missing_attributes(file)) == [
        "program.py:4: attnlib.env has no missing",
        "program.py:6: there is no attnlib.env.missing",
        "program.py:3: attnlib.errors has no NoSuchError",
        "program.py:8: attnlib.errors has no raw",
    ]


def test_a_missing_name_is_found(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("from attnlib.errors import ContractError, NoSuchError\n")
    assert list(missing_names(file)) == ["program.py:1: attnlib.errors has no NoSuchError"]
    (tmp_path / "shapes.py").write_text("SHAPES = {}\n")
    script = tmp_path / "script.py"
    script.write_text("from shapes import MODEL, SHAPES\n")
    assert list(missing_names(script)) == ["script.py:1: shapes has no MODEL"]
