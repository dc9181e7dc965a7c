"""Cheaper arithmetic of score functions in the Hopper kernels, by changes of their syntax trees.

A prefill on Hopper is bound by the instructions of every score (kernel notes), and integer
instructions and conversions are the slow ones. Two changes leave less of them; `score_products` has
a third one:

- `q_pos - k_pos` becomes `distance(q_pos, k_pos)`, float32, where its value becomes floating point
  anyway. It is exact up to 2^24.
- In a product of floating-point numbers the factors that are equal for all keys are multiplied
  first, once per row: `(q_pos - k_pos) * (head + 1) * 0.5` becomes
  `distance(q_pos, k_pos) * ((head + 1) * 0.5)`.

Values that remain integers (indices of `lookup`, operands of `//`, `%`, `&` and comparisons) do not
change. Functions with control flow are left as they are.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable

from attnlib.ops.triton.launch.score_syntax import POSITIONS, Names, factors_of, statements_of

__all__ = ["simplify_arithmetic"]

_TO_FLOAT = frozenset({"sqrt", "exp", "exp2", "log", "log2", "floor"})
_SELECT = frozenset({"absolute", "minimum", "maximum"})


def simplify_arithmetic(
    definition: ast.FunctionDef, form: str, operator_of: Callable[[ast.expr], str | None]
) -> None:
    """Change the body of a score function.

    Args:
        definition: the function.
        form: `ScoreFunction.form`.
        operator_of: returns the name of a called expression in
            `attnlib.score_functions.operators`, or None.
    """
    body = statements_of(definition)
    if form not in POSITIONS or body is None:
        return
    simplifier = _Simplifier(definition, form, operator_of)
    for node in body:
        node.value = simplifier.statement(node)
    definition.body = [*body]


class _Simplifier(Names):
    """Changes expressions of one function, statement by statement."""

    def __init__(
        self,
        definition: ast.FunctionDef,
        form: str,
        operator_of: Callable[[ast.expr], str | None],
    ) -> None:
        super().__init__(definition, form, operator_of)
        self._float = {self.score}
        self._distances: dict[str, ast.expr] = {}

    def statement(self, node: ast.Assign | ast.Return) -> ast.expr:
        """The changed value of an assignment or of the return statement."""
        assert node.value is not None  # the caller has checked
        value = node.value
        changed = self._change(value, False)
        if isinstance(node, ast.Assign):
            name = self.assign(node)
            if self._is_float(value):
                self._float.add(name)
            if self._is_distance(value):
                # Its uses decide between integer and float; what is not used costs nothing.
                self._distances[name] = value
        return changed

    def _change(self, node: ast.expr, as_float: bool) -> ast.expr:
        """The expression, changed; `as_float`: its value becomes floating point."""
        change = functools.partial(self._change, as_float=as_float)
        if as_float and self._is_distance(node):
            return ast.Call(ast.Name("distance", ast.Load()), self._operands(node), [])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            as_float = as_float or self._is_float(node)
            if isinstance(node.op, ast.Mult) and as_float:
                return self.product([self._change(factor, True) for factor in factors_of(node)])
            left, right = self._change(node.left, as_float), self._change(node.right, as_float)
            return ast.BinOp(left, node.op, right)
        if isinstance(node, ast.BinOp):
            as_float = isinstance(node.op, ast.Div)
            left, right = self._change(node.left, as_float), self._change(node.right, as_float)
            return ast.BinOp(left, node.op, right)
        if isinstance(node, ast.UnaryOp):
            as_float = as_float and isinstance(node.op, ast.USub | ast.UAdd)
            return ast.UnaryOp(node.op, self._change(node.operand, as_float))
        if isinstance(node, ast.Compare):
            others = [self._change(other, False) for other in node.comparators]
            return ast.Compare(self._change(node.left, False), node.ops, others)
        if isinstance(node, ast.Call) and not node.keywords:
            operator = self.operator_of(node.func)
            arguments = [change(a, as_float=False) for a in node.args]
            if operator in _TO_FLOAT:
                arguments = [change(a, as_float=True) for a in node.args]
            elif operator in _SELECT:
                both = as_float or self._is_float(node)
                arguments = [change(a, as_float=both) for a in node.args]
            elif operator == "where" and len(node.args) == 3:
                both = as_float or self._is_float(node)
                arguments[1:] = [change(a, as_float=both) for a in node.args[1:]]
            return ast.Call(node.func, arguments, [])
        return node

    def _is_distance(self, node: ast.expr) -> bool:
        """Whether the expression is `q_pos - k_pos`, or a local variable with this value."""
        if isinstance(node, ast.Name):
            return node.id in self._distances
        operands = self._operands(node)
        names = [operand.id for operand in operands if isinstance(operand, ast.Name)]
        return names == [self.q_pos, self.k_pos]

    def _operands(self, node: ast.expr) -> list[ast.expr]:
        if isinstance(node, ast.Name):
            node = self._distances[node.id]
        is_difference = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)
        return [node.left, node.right] if is_difference and isinstance(node, ast.BinOp) else []

    def _is_float(self, node: ast.expr) -> bool:
        """Whether the value is known to be floating point."""
        if isinstance(node, ast.Name):
            return node.id in self._float
        if isinstance(node, ast.Constant):
            return isinstance(node.value, float)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.USub | ast.UAdd) and self._is_float(node.operand)
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
                return self._is_float(node.left) or self._is_float(node.right)
            return isinstance(node.op, ast.Div)
        if isinstance(node, ast.Call):
            operator = self.operator_of(node.func)
            values = node.args[1:] if operator == "where" else node.args
            known = operator in _SELECT or operator == "where"
            return operator in _TO_FLOAT or (known and any(map(self._is_float, values)))
        return False
