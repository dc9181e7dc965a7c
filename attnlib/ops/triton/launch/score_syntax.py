"""Syntax trees of score functions: their statements, names and products."""

from __future__ import annotations

import ast
from collections.abc import Callable

__all__ = ["POSITIONS", "Names", "factors_of", "multiply", "statements_of"]

POSITIONS = {"score": (0, 1, 2), "score_mod": (0, 3, 4)}
"""Form of a function -> indices of its parameters score, query position and key position."""


def statements_of(definition: ast.FunctionDef) -> list[ast.Assign | ast.Return] | None:
    """The statements of a body that assigns each local variable once and then returns; None for
    other bodies."""
    seen = {argument.arg for argument in definition.args.args}
    body = [node for node in definition.body if not _is_docstring(node)]
    found: list[ast.Assign | ast.Return] = []
    for number, node in enumerate(body):
        if number == len(body) - 1:
            if not isinstance(node, ast.Return) or node.value is None:
                return None
        elif not isinstance(node, ast.Assign) or len(node.targets) > 1:
            return None
        else:
            target = node.targets[0]
            if not isinstance(target, ast.Name) or target.id in seen:
                return None
            seen.add(target.id)
        found.append(node)
    return found


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class Names:
    """The names of one function, statement by statement: which values differ from key to key.

    Args:
        definition: the function.
        form: `ScoreFunction.form`, "score" or "score_mod".
        operator_of: returns the name of a called expression in
            `attnlib.score_functions.operators`, or None.
    """

    def __init__(
        self,
        definition: ast.FunctionDef,
        form: str,
        operator_of: Callable[[ast.expr], str | None],
    ) -> None:
        self.score, self.q_pos, self.k_pos = (
            definition.args.args[index].arg for index in POSITIONS[form]
        )
        self.operator_of = operator_of
        self._per_key = {self.score, self.k_pos}

    def assign(self, node: ast.Assign) -> str:
        """Follow an assignment to a local variable; returns the variable."""
        target = node.targets[0]
        assert isinstance(target, ast.Name)  # `statements_of` has checked it
        if self.depends_on_key(node.value):
            self._per_key.add(target.id)
        return target.id

    def depends_on_key(self, node: ast.expr) -> bool:
        """Whether the value may differ from key to key."""
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return bool(names & self._per_key)

    def product(self, factors: list[ast.expr]) -> ast.expr:
        """The product, with the factors that are equal for all keys multiplied first."""
        per_key = [factor for factor in factors if self.depends_on_key(factor)]
        per_row = [factor for factor in factors if not self.depends_on_key(factor)]
        if not per_key or len(per_row) < 2:
            return multiply(factors)
        return multiply([*per_key, multiply(per_row)])


def factors_of(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*factors_of(node.left), *factors_of(node.right)]
    return [node]


def multiply(factors: list[ast.expr]) -> ast.expr:
    product = factors[0]
    for factor in factors[1:]:
        product = ast.BinOp(product, ast.Mult(), factor)
    return product
