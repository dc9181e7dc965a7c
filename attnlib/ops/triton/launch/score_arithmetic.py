"""Cheaper arithmetic of score functions in the Hopper kernels, by changes of their syntax trees.

A prefill on Hopper is bound by the instructions of every score (kernel notes), and integer
instructions and conversions are the slow ones. Two changes leave less of them:

- `q_pos - k_pos` becomes `distance(q_pos, k_pos)`, float32, where its value becomes floating point
  anyway. It is exact up to 2^24.
- In a product of floating-point numbers the factors that are equal for all keys are multiplied
  first, once per row: `(q_pos - k_pos) * (head + 1) * 0.5` becomes
  `distance(q_pos, k_pos) * ((head + 1) * 0.5)`.
- A function that adds to the score or hides keys can take the raw product q . k instead of the
  score: what it adds is divided by the softmax scale, also once per row, and the softmax applies
  the scale to the sum.

Values that remain integers (indices of `lookup`, operands of `//`, `%`, `&` and comparisons) do not
change. Functions with control flow are left as they are.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable

__all__ = ["INVERSE_SCALE", "differentiate", "simplify_arithmetic", "take_raw_products"]

INVERSE_SCALE = "inverse_scale"
"""Name of the parameter that `take_raw_products` adds."""

_TO_FLOAT = frozenset({"sqrt", "exp", "exp2", "log", "log2", "floor"})
_SELECT = frozenset({"absolute", "minimum", "maximum"})
_POSITIONS = {"score": (0, 1, 2), "score_mod": (0, 3, 4)}
"""Form of a function -> indices of its parameters score, query position and key position."""


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
    body = _statements(definition)
    if form not in _POSITIONS or body is None:
        return
    simplifier = _Simplifier(definition, form, operator_of)
    for node in body:
        node.value = simplifier.statement(node)
    definition.body = [*body]


def take_raw_products(
    definition: ast.FunctionDef, form: str, operator_of: Callable[[ast.expr], str | None]
) -> bool:
    """Change a function so that it takes and returns products q . k instead of scores.

    A function of scores gets a last parameter, the inverse of the softmax scale.

    Args:
        definition: the function, changed by `simplify_arithmetic`.
        form, operator_of: as there.

    Returns:
        Whether it was possible. If not, the function may be half changed.
    """
    if form == "mask_mod":
        return True  # it does not see the score
    body = _statements(definition)
    if body is None:
        return False
    simplifier = _Simplifier(definition, form, operator_of)
    if not all(map(simplifier.to_raw, body)):
        return False
    definition.args.args.append(ast.arg(INVERSE_SCALE))
    return True


def differentiate(
    definition: ast.FunctionDef, form: str, operator_of: Callable[[ast.expr], str | None]
) -> bool:
    """Change a function to return the derivative of its result by the key's position.

    Args:
        definition: the function, changed by `take_raw_products`.
        form, operator_of: as in `simplify_arithmetic`.

    Returns:
        Whether the derivative is equal for all keys and not 0, so that the function is
        score + slope * k_pos + a term of the row. If not, the function may be half changed.
    """
    if form == "mask_mod":
        return False
    simplifier = _Simplifier(definition, form, operator_of)
    result = definition.body[-1]
    assert isinstance(result, ast.Return) and result.value is not None  # it returns the score
    kept: list[ast.stmt] = []
    for node in definition.body[:-1]:
        assert isinstance(node, ast.Assign)  # `take_raw_products` has checked
        if not simplifier.to_raw(node):
            return False
        if not simplifier.depends_on_key(node.value):
            kept.append(node)
    slope = simplifier.derivative(result.value)
    if slope is None or isinstance(slope, ast.Constant):
        return False
    definition.body = [*kept, ast.Return(slope)]
    return True


def _statements(definition: ast.FunctionDef) -> list[ast.Assign | ast.Return] | None:
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


class _Simplifier:
    """Changes expressions of one function, statement by statement."""

    def __init__(
        self,
        definition: ast.FunctionDef,
        form: str,
        operator_of: Callable[[ast.expr], str | None],
    ) -> None:
        score, q_pos, k_pos = (definition.args.args[index].arg for index in _POSITIONS[form])
        self._q_pos, self._k_pos = q_pos, k_pos
        self._operator_of = operator_of
        self._float = {score}
        self._per_key = {score, k_pos}
        self._distances: dict[str, ast.expr] = {}
        self._raw = {score}
        self._assigned: set[str] = set()

    def statement(self, node: ast.Assign | ast.Return) -> ast.expr:
        """The changed value of an assignment or of the return statement."""
        assert node.value is not None  # the caller has checked
        value = node.value
        changed = self._change(value, False)
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            assert isinstance(target, ast.Name)  # likewise
            if self._is_float(value):
                self._float.add(target.id)
            if self.depends_on_key(value):
                self._per_key.add(target.id)
            if self._is_distance(value):
                # Its uses decide between integer and float; what is not used costs nothing.
                self._distances[target.id] = value
        return changed

    def to_raw(self, node: ast.Assign | ast.Return) -> bool:
        """Change the units of a statement; False if it is not linear in the score."""
        assert node.value is not None  # the caller has checked
        linear = self._raw_value(node.value)
        if isinstance(node, ast.Return):
            if linear is None:
                return False
            node.value = linear
            return True
        target = node.targets[0]
        if not isinstance(target, ast.Name):
            return False
        if self.depends_on_key(node.value):
            self._per_key.add(target.id)
        if self._depends_on_score(node.value):
            if linear is None:
                return False
            node.value = linear
            self._raw.add(target.id)
        self._assigned.add(target.id)
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
        if isinstance(node, ast.Call) and self._operator_of(node.func) == "where":
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
        return self._product([*_factors(node), ast.Name(INVERSE_SCALE, ast.Load())])

    def _depends_on_score(self, node: ast.expr) -> bool:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return bool(names & self._raw)

    def derivative(self, node: ast.expr) -> ast.expr | None:
        """The derivative by the key's position, 0 as a constant; None if it differs from key to key
        or is not known."""
        zero = ast.Constant(0.0)
        if isinstance(node, ast.Name):
            if node.id == self._k_pos:
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
            factors = _factors(node)
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

    def _change(self, node: ast.expr, as_float: bool) -> ast.expr:
        """The expression, changed; `as_float`: its value becomes floating point."""
        change = functools.partial(self._change, as_float=as_float)
        if as_float and self._is_distance(node):
            return ast.Call(ast.Name("distance", ast.Load()), self._operands(node), [])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            as_float = as_float or self._is_float(node)
            if isinstance(node.op, ast.Mult) and as_float:
                return self._product([self._change(factor, True) for factor in _factors(node)])
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
            operator = self._operator_of(node.func)
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

    def _product(self, factors: list[ast.expr]) -> ast.expr:
        """The product, with the factors that are equal for all keys multiplied first."""
        per_key = [factor for factor in factors if self.depends_on_key(factor)]
        per_row = [factor for factor in factors if not self.depends_on_key(factor)]
        if not per_key or len(per_row) < 2:
            return _multiply(factors)
        return _multiply([*per_key, _multiply(per_row)])

    def _is_distance(self, node: ast.expr) -> bool:
        """Whether the expression is `q_pos - k_pos`, or a local variable with this value."""
        if isinstance(node, ast.Name):
            return node.id in self._distances
        operands = self._operands(node)
        names = [operand.id for operand in operands if isinstance(operand, ast.Name)]
        return names == [self._q_pos, self._k_pos]

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
            operator = self._operator_of(node.func)
            values = node.args[1:] if operator == "where" else node.args
            known = operator in _SELECT or operator == "where"
            return operator in _TO_FLOAT or (known and any(map(self._is_float, values)))
        return False

    def depends_on_key(self, node: ast.expr) -> bool:
        """Whether the value may differ from key to key."""
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return bool(names & self._per_key)


def _product_with(slope: ast.expr | None, factors: list[ast.expr]) -> ast.expr | None:
    """The slope times other factors; 0 remains 0."""
    return slope if slope is None or _is_zero(slope) else _multiply([*factors, slope])


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0.0


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_hidden(node: ast.expr) -> bool:
    """Whether the expression is `float("-inf")`."""
    return ast.unparse(node).replace('"', "'") == "float('-inf')"


def _factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    return [node]


def _multiply(factors: list[ast.expr]) -> ast.expr:
    product = factors[0]
    for factor in factors[1:]:
        product = ast.BinOp(product, ast.Mult(), factor)
    return product
