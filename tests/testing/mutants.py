"""Mutants of a module: copies with one change each.

A change is another comparison or arithmetic operator, another constant, a dropped term, condition,
sign or keyword argument, swapped arguments, a removed mask, conversion or statement, or the
opposite condition. Nothing is changed in what computes nothing: texts, annotations, decorators,
errors, type checks, and declarations of capabilities, which the suite takes from the backend.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Mutant", "mutants_of"]

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_TERMS = (ast.Add, ast.Sub, ast.BitAnd, ast.BitOr)
_REMOVED_CALLS = frozenset(
    "abs clamp clamp_ clamp_max clamp_min double float masked_fill nan_to_num to".split()
)
_UNORDERED = {"isinstance", "max", "maximum", "min", "minimum", "on_host", "transpose"}
"""Functions of which swapped arguments give the same result on a CPU, or no result at all."""
_KEPT_KEYWORDS = {None, "device", "strict"}
"""Keywords that change no result on one device: everything runs there, and `strict` only checks."""


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    Attributes:
        line, column: where the changed node starts.
        lines: first and last line of its statement, without the body of a compound statement.
        change: description.
    """

    line: int
    column: int
    lines: tuple[int, int]
    change: str
    _tree: ast.Module
    _parent: ast.AST
    _field: str
    _index: int | None
    _node: ast.expr | ast.stmt
    _changed: ast.expr | ast.stmt

    @contextmanager
    def applied(self) -> Iterator[ast.Module]:
        """The module with the change; the other nodes keep their lines."""
        self._replace(self._changed)
        try:
            yield self._tree
        finally:
            self._replace(self._node)

    def _replace(self, node: ast.expr | ast.stmt) -> None:
        if self._index is None:
            setattr(self._parent, self._field, node)
        else:
            getattr(self._parent, self._field)[self._index] = node


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a module."""
    tree, found = ast.parse(source), []
    skipped, statements = _skipped(tree), _statements(tree)
    for parent, field, index, node in _children(tree):
        if node in skipped:
            continue
        for what, changed in _changes(node):
            ast.fix_missing_locations(ast.copy_location(changed, node))
            change = f"{what}: {_text(node)} -> {_text(changed)}"
            where = (node.lineno, node.col_offset, _lines(statements[node]))
            found.append(Mutant(*where, change, tree, parent, field, index, node, changed))
    return found


def _children(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None, ast.expr | ast.stmt]]:
    """Each expression and statement with its parent, field, and index in a field with a list."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            several = isinstance(value, list)
            for index, node in enumerate(value if several else [value]):
                if isinstance(node, (ast.expr, ast.stmt)):
                    yield parent, field, index if several else None, node


def _text(node: ast.expr | ast.stmt) -> str:
    return ast.unparse(node.test if isinstance(node, ast.If) else node)


def _skipped(tree: ast.Module) -> set[ast.AST]:
    """Nodes that compute nothing: annotations, decorators, errors, texts and type checks."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
            roots.append(node)
        elif isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            roots.append(node.annotation)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            roots += [*node.decorator_list, *([node.returns] if node.returns else [])]
        elif isinstance(node, ast.ClassDef):
            roots += node.decorator_list
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("Capabilities", "cast"):
            roots.append(node)
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            roots.append(node.value)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            roots.append(node)
    return {child for root in roots for child in ast.walk(root)}


def _statements(tree: ast.Module) -> dict[ast.AST, ast.stmt]:
    """Node -> the innermost statement that contains it."""
    found: dict[ast.AST, ast.stmt] = {}
    for statement in ast.walk(tree):  # outer statements come first
        if isinstance(statement, ast.stmt):
            found.update(dict.fromkeys(ast.walk(statement), statement))
    return found


def _lines(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    last = max(body[0].lineno - 1, statement.lineno) if body else statement.end_lineno
    return statement.lineno, last or statement.lineno


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """The changed copies of a node with their descriptions."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.stmt):
        yield from _changed_statements(new)
    elif isinstance(new, ast.Call):
        yield from _changed_calls(new)
    elif isinstance(new, ast.Constant):
        yield from _changed_constants(new.value)
    elif isinstance(new, ast.IfExp):
        yield from _opposite_condition(new)
    elif isinstance(new, ast.Compare) and type(new.ops[0]) in _COMPARISONS:
        new.ops[0] = _COMPARISONS[type(new.ops[0])]()
        yield "comparison", new
    elif isinstance(new, ast.BinOp) and type(new.op) in _OPERATORS:
        if isinstance(new.op, _TERMS):
            yield "dropped term", new.left
        yield "operator", ast.BinOp(new.left, _OPERATORS[type(new.op)](), new.right)
    elif isinstance(new, ast.BoolOp):
        rest = new.values[:-1]
        yield "dropped condition", rest[0] if len(rest) == 1 else ast.BoolOp(new.op, rest)
        other = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield "and/or", ast.BoolOp(other, new.values)
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, (ast.USub, ast.Invert, ast.Not)):
        yield "dropped sign or not", new.operand


def _changed_statements(new: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    writes = isinstance(new, ast.Assign) and isinstance(new.targets[0], ast.Subscript)
    calls = isinstance(new, ast.Expr) and isinstance(new.value, ast.Call)
    if writes or calls or isinstance(new, (ast.AugAssign, ast.Continue, ast.Break)):
        yield "removed statement", ast.Pass()
    elif isinstance(new, ast.If):
        yield from _opposite_condition(new)


def _opposite_condition(new: ast.If | ast.IfExp) -> Iterator[tuple[str, ast.If | ast.IfExp]]:
    """The opposite of a condition that is a name or a call; others have changes of their own."""
    if isinstance(new.test, (ast.Name, ast.Attribute, ast.Call)):
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield "opposite condition", new


def _changed_constants(value: object) -> Iterator[tuple[str, ast.Constant]]:
    if type(value) is int:
        yield "constant + 1", ast.Constant(value + 1)
    elif type(value) is float:
        other = 1.0 if value == 0.0 or math.isinf(value) else 2.0 * value
        yield "other constant", ast.Constant(other)
    elif type(value) is bool:
        yield "other boolean", ast.Constant(not value)


def _changed_calls(new: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = new.func.attr if isinstance(new.func, ast.Attribute) else ast.unparse(new.func)
    if isinstance(new.func, ast.Attribute) and name in _REMOVED_CALLS:
        yield f"removed {name}", new.func.value
    if len(new.args) >= 2 and name not in _UNORDERED:
        swapped = list(new.args)
        first = len(swapped) - 2 if name == "where" else 0
        swapped[first : first + 2] = reversed(swapped[first : first + 2])
        yield "swapped arguments", ast.Call(new.func, swapped, new.keywords)
    for keyword in new.keywords:
        if keyword.arg not in _KEPT_KEYWORDS:
            rest = [other for other in new.keywords if other is not keyword]
            yield f"dropped {keyword.arg}", ast.Call(new.func, new.args, rest)
