"""Changes of a test module on load: forward pass only, and another device.

Forward only: a statement that computes gradients (`torch.autograd.grad`, `.backward()`, `.grad`),
and every statement that reads a name which only such a statement binds, is removed. What remains
asserts outputs. The device: string constants "cuda" and "cuda:N" become the name of the device, and
the index in `.to(0)` too.
"""

from __future__ import annotations

import ast
import re

__all__ = ["checks_gradients_only", "rewrite"]

_ASSERTING = re.compile(r"assert|check|close|allclose")


def rewrite(source: str, device: str) -> ast.Module:
    """The module with the changes above."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.body = _forward_only(node.body, set()) or [ast.Pass()]
    if device != "cuda":
        tree = _Device(device).visit(tree)
    return ast.fix_missing_locations(tree)


def checks_gradients_only(function: ast.FunctionDef, original: str) -> bool:
    """Whether a test computed gradients and, rewritten, asserts nothing.

    Args:
        function: the rewritten test.
        original: the source of the module before.
    """
    before = next(
        node
        for node in ast.parse(original).body
        if isinstance(node, ast.FunctionDef) and node.name == function.name
    )
    return _depends(before, set()) and not any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.With) and "raises" in ast.unparse(node.items[0]))
        or (isinstance(node, ast.Call) and _ASSERTING.search(ast.unparse(node.func)))
        for node in ast.walk(function)
    )


def _forward_only(body: list[ast.stmt], gradients: set[str]) -> list[ast.stmt]:
    """The statements that depend on no gradient. `gradients` collects the names that hold one."""
    kept: list[ast.stmt] = []
    for statement in body:
        inner = [name for name in ("body", "orelse", "finalbody") if getattr(statement, name, None)]
        if inner and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            head = [n for n in ast.iter_child_nodes(statement) if isinstance(n, ast.expr)]
            if any(_depends(node, gradients) for node in head):
                continue
            for name in inner:
                setattr(statement, name, _forward_only(getattr(statement, name), gradients))
            if not statement.body:  # type: ignore[attr-defined]  # it has one, see `inner`
                statement.body = [ast.Pass()]  # type: ignore[attr-defined]  # as above
            kept.append(statement)
        elif _depends(statement, gradients):
            gradients |= _bound(statement)
        else:
            gradients -= _bound(statement)
            kept.append(statement)
    return kept


def _depends(node: ast.AST, gradients: set[str]) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and part.id in gradients:
            return True
        if isinstance(part, ast.Attribute) and part.attr in ("grad", "backward"):
            return True
    return False


def _bound(statement: ast.stmt) -> set[str]:
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


class _Device(ast.NodeTransformer):
    """Replaces the device in string constants and in `.to(0)`."""

    def __init__(self, device: str) -> None:
        self._device = device

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and re.fullmatch(r"cuda(:\d+)?", node.value):
            return ast.copy_location(ast.Constant(self._device), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_to = isinstance(node.func, ast.Attribute) and node.func.attr == "to"
        if is_to and node.args and isinstance(node.args[0], ast.Constant):
            if type(node.args[0].value) is int:
                node.args[0] = ast.Constant(self._device)
        return node
