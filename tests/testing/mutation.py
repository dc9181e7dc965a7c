"""Change the torch backend at one place, and see whether `attnlib verify` notices.

    python -m tests.testing.mutation --sample 500 --seed 0

A mutant is one change of one module of `attnlib/ops/torch` or `attnlib/backends/torch`: another
comparison or arithmetic operator, an integer that is one larger, `and` for `or`, a dropped minus or
`not`, or swapped arguments. Each mutant is a copy of the package in a process of its own, which
stops at the first failed case. Survivors are printed with their line: a survivor is equivalent to
the original, or needs a new check.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutant", "mutants_of"]

PACKAGE = Path(__file__).parents[2] / "attnlib"
FOLDERS = ("ops/torch", "backends/torch")
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_RUN = """
import sys, torch, attnlib
assert attnlib.__file__.startswith({folder!r}), attnlib.__file__
torch.set_num_threads(1)
from attnlib.testing.check import run_check
from attnlib.testing.checks import CHECKS
from attnlib.testing.conformance import make_target
from attnlib.testing.outcome import Outcome

def stop(result):
    if result.outcome is Outcome.FAIL:
        print(result.id, flush=True)
        raise SystemExit(1)

target = make_target("torch", device="cpu", against=[], quick={quick})
for check in CHECKS:
    run_check(check, target, on_result=stop)
"""


@dataclass(frozen=True)
class Mutant:
    """One change: the line, a description, and the source of the module with the change."""

    line: int
    change: str
    source: str


def _skipped(tree: ast.Module) -> set[ast.AST]:
    """Nodes of docstrings, annotations, errors and lists of names: they compute nothing."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Raise, ast.Assert)):
            roots.append(node)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            roots.append(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            roots.append(node.annotation)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
            roots.append(node.returns)
        elif isinstance(node, ast.JoinedStr):
            roots.append(node)
    return {child for root in roots for child in ast.walk(root)}


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The changed copies of a node with their descriptions."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in _COMPARISONS:
        new.ops[0] = _COMPARISONS[type(new.ops[0])]()
        yield "comparison", new
    elif isinstance(new, ast.BinOp) and type(new.op) in _OPERATORS:
        new.op = _OPERATORS[type(new.op)]()
        yield "operator", new
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield "and/or", new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, (ast.USub, ast.Invert, ast.Not)):
        yield "dropped sign or not", new.operand
    elif isinstance(new, ast.Constant) and type(new.value) is int:
        new.value += 1
        yield "constant + 1", new
    elif isinstance(new, ast.Constant) and type(new.value) is bool:
        new.value = not new.value
        yield "other boolean", new
    elif isinstance(new, ast.Call) and len(new.args) >= 2 and not isinstance(new.func, ast.Name):
        new.args[0], new.args[1] = new.args[1], new.args[0]
        yield "swapped arguments", new


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a module."""
    tree, found = ast.parse(source), []
    skipped = _skipped(tree)
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            for index, node in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(node, ast.expr) or node in skipped:
                    continue
                for what, changed in _changes(node):
                    if isinstance(value, list):
                        value[index] = changed
                    else:
                        setattr(parent, name, changed)
                    before, after = ast.unparse(node), ast.unparse(changed)
                    found.append(
                        Mutant(node.lineno, f"{what}: {before} -> {after}", ast.unparse(tree))
                    )
                    if isinstance(value, list):
                        value[index] = node
                    else:
                        setattr(parent, name, node)
    return found


def _first_failure(folder: Path, quick: bool, seconds: float) -> str:
    """The first failed case with the package in `folder`; "" if all pass."""
    settings = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **settings}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _RUN.format(quick=quick, folder=str(folder))],
            cwd=folder,
            env=environment, capture_output=True, text=True, check=False, timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "timeout"
    if done.returncode == 0:
        return ""
    return done.stdout.strip() or (done.stderr.strip().splitlines() or ["no output"])[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a random sample of mutants and print the survivors and the share that is noticed."""
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__)
    parser.add_argument("--sample", type=int, default=20, help="number of mutants (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--quick", action="store_true", help="the short form of each check")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each mutant")
    args = parser.parse_args(arguments)
    every = [
        (path, mutant)
        for folder in FOLDERS
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for mutant in mutants_of(path.read_text(encoding="utf-8"))
    ]
    sample = random.Random(args.seed).sample(every, min(args.sample, len(every)))
    noticed = 0
    with tempfile.TemporaryDirectory() as root:
        shutil.copytree(PACKAGE, Path(root) / "attnlib")
        if failed := _first_failure(Path(root), args.quick, args.timeout):
            print(f"without a change, {failed} fails", file=sys.stderr)
            return 2
        for path, mutant in sample:
            name = path.relative_to(PACKAGE)
            target = Path(root) / "attnlib" / name
            target.write_text(mutant.source, encoding="utf-8")
            found = _first_failure(Path(root), args.quick, args.timeout)
            shutil.copyfile(path, target)
            noticed += bool(found)
            outcome = f"noticed by {found}" if found else "SURVIVES"
            print(f"{name}:{mutant.line}: {mutant.change}: {outcome}", flush=True)
    print(f"{noticed} of {len(sample)} mutants noticed (of {len(every)} in all)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
