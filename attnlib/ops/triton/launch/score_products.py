"""Score functions of raw products q . k, and their slopes, by changes of their syntax trees.

A function that adds to the score or hides keys can take the raw product q . k instead of the score:
what it adds is divided by the softmax scale, once per row, and the softmax applies the scale to the
sum. If what it adds is linear in the key's position, the Hopper prefill adds it by the tensor cores
(`hopper.kernels.softmax.slope_operand`), given the slope of each row.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from attnlib.ops.triton.launch.score_syntax import Names, factors_of, multiply, statements_of

__all__ = ["INVERSE_SCALE", "differentiate", "take_raw_products"]

INVERSE_SCALE = "inverse_scale"
"""Name of the parameter that `take_raw_products` adds."""


def take_raw_products(
    definition: ast.FunctionDef, form: str, operator_of: Callable[[ast.expr], str | None]
) -> bool:
    """Change a function so that it takes and returns products q . k instead of scores.

    A function of scores gets a last parameter, the inverse of the softmax scale.

    Args:
        definition: the function, changed by `simplify_arithmetic`.
        form, operator_of: see `simplify_arithmetic`.

    Returns:
        Whether it was possible. If not, the function may be half changed.
    """
    if form == "mask_mod":
        return True  # it does not see the score
    body = statements_of(definition)
    if body is None:
        return False
    products = _Products(definition, form, operator_of)
    if not all(map(products.to_raw, body)):
        return False
    definition.args.args.append(ast.arg(INVERSE_SCALE))
    return True


def differentiate(
    definition: ast.FunctionDef, form: str, operator_of: Callable[[ast.expr], str | None]
) -> bool:
    """Change a function to return the derivative of its result by the key's position.

    Args:
        definition: the function, changed by `take_raw_products`.
        form, operator_of: as for `simplify_arithmetic`.

    Returns:
        Whether the derivative is equal for all keys and not 0, so that the function is
        score + slope * k_pos + a term of the row. If not, the function may be half changed.
    """
    if form == "mask_mod":
        return False
    products = _Products(definition, form, operator_of)
    result = definition.body[-1]
    assert isinstance(result, ast.Return) and result.value is not None  # it returns the score
    kept: list[ast.stmt] = []
    for node in definition.body[:-1]:
        assert isinstance(node, ast.Assign)  # `take_raw_products` has checked
        if not products.to_raw(node):
            return False
        if not products.depends_on_key(node.value):
            kept.append(node)
    slope = products.derivative(result.value)
    if slope is None or isinstance(slope, ast.Constant):
        return False
    definition.body = [*kept, ast.Return(slope)]
    return True


class _Products(Names):
    """Changes the units of one function, statement by statement."""

    def __init__(
        self,
        definition: ast.FunctionDef,
        form: str,
        operator_of: Callable[[ast.expr], str | None],
    ) -> None:
        super().__init__(definition, form, operator_of)
        self._raw = {self.score}
        self._assigned: set[str] = set()

    def to_raw(self, node: ast.Assign | ast.Return) -> bool:
        """Change the units of a statement; False if it is not linear in the score."""
        assert node.value is not None  # the caller has checked
        linear = self._raw_value(node.value)
        if isinstance(node, ast.Return):
            if linear is None:
                return False
            node.value = linear
            return True
        name = self.assign(node)
        if self._depends_on_score(node.value):
            if linear is None:
                return False
            node.value = linear
            self._raw.add(name)
        self._assigned.add(name)
        return True

    def _raw_value(self, node: ast.expr) -> ast.expr | None:
        """The value in units of products, for the score plus other terms; None for others."""
        if isinstance(node, ast.Name):
            return node if node.id in self._raw else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            left, right = self._raw_value(node.left), self._raw_value(node.right)
            if left is not None and not self._depends_on_score(node.right):
                return ast.BinOp(left, node.op, self._in_units(node.right))
            swapped = isinstance(node.op, ast.Add) and not self._depends_on_score(node.left)
            if right is not None and swapped:
                return ast.BinOp(right, node.op, self._in_units(node.left))
            return None
        if isinstance(node, ast.Call) and self.operator_of(node.func) == "where":
            condition, *values = node.args
            if len(values) != 2 or node.keywords or self._depends_on_score(condition):
                return None
            changed = [v if _is_hidden(v) else self._raw_value(v) for v in values]
            found = [value for value in changed if value is not None]
            return ast.Call(node.func, [condition, *found], []) if len(found) == 2 else None
        return None

    def _in_units(self, node: ast.expr) -> ast.expr:
        """What is added to the score, divided by the scale."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            return ast.BinOp(self._in_units(node.left), node.op, self._in_units(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return ast.UnaryOp(node.op, self._in_units(node.operand))
        return self.product([*factors_of(node), ast.Name(INVERSE_SCALE, ast.Load())])

    def _depends_on_score(self, node: ast.expr) -> bool:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return bool(names & self._raw)

    def derivative(self, node: ast.expr) -> ast.expr | None:
        """The derivative by the key's position, 0 as a constant; None if it differs from key to key
        or is not known."""
        zero = ast.Constant(0.0)
        if isinstance(node, ast.Name):
            if node.id == self.k_pos:
                return ast.Constant(1.0)
            is_score = node.id in self._raw and node.id not in self._assigned
            return zero if is_score or not self.depends_on_key(node) else None
        if isinstance(node, ast.Call) and _is_named(node.func, "distance"):
            return ast.Constant(-1.0)
        if not self.depends_on_key(node):
            return zero
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return _product_with(self.derivative(node.operand), [ast.Constant(-1.0)])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            factors = factors_of(node)
            per_key = [factor for factor in factors if self.depends_on_key(factor)]
            per_row = [factor for factor in factors if not self.depends_on_key(factor)]
            return (
                _product_with(self.derivative(per_key[0]), per_row) if len(per_key) == 1 else None
            )
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            left, right = self.derivative(node.left), self.derivative(node.right)
            if left is None or right is None:
                return None
            if _is_zero(right):
                return left
            if _is_zero(left):
                negative = isinstance(node.op, ast.Sub)
                return _product_with(right, [ast.Constant(-1.0)]) if negative else right
            return ast.BinOp(left, node.op, right)
        return None


def _product_with(slope: ast.expr | None, factors: list[ast.expr]) -> ast.expr | None:
    """The slope times other factors; 0 remains 0."""
    return slope if slope is None or _is_zero(slope) else multiply([*factors, slope])


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0.0


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_hidden(node: ast.expr) -> bool:
    """Whether the expression is `float("-inf")`."""
    return ast.unparse(node).replace('"', "'") == "float('-inf')"
