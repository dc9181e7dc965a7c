"""Tests of the segments of keys of the batch-invariant Hopper kernels."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest
from triton.language import constexpr

import attnlib.ops.triton
from attnlib.ops.triton.hopper.kernels.segments import _segments, query_rows
from attnlib.ops.triton.hopper.sizes import decode_rows


@pytest.mark.parametrize("width_v", [64, 128, 256])
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 8, 16, 64])
def test_ends_of_the_longest_segments_of_a_decode_are_ends_of_all(
    width_v: int, block_n: int, group: int
) -> None:
    """M15: a decode, whose queries have segments of at most two lengths, is cut there."""
    *entries, (_, last_tiles) = _segments(width_v, group, block_n)
    tiles = [*(count for _, count in entries), last_tiles]
    assert all(count > 0 and count & (count - 1) == 0 for count in tiles), tiles
    positions = [position for position, _ in entries]
    for position, following in zip(positions, positions[1:], strict=False):
        assert following - position >= decode_rows(width_v) // group
    # All queries of a query tile of the prefill have segments of one length.
    tokens = query_rows(width_v, group) // group
    assert all(position % tokens == 0 for position in positions)


def test_values_of_64_elements_have_segments_of_as_many_bytes() -> None:
    """Beyond the first queries, whose short segments divide decodes of few keys."""
    for number in (-2, -1):
        position, tiles = _segments(128, 4, 128)[number]
        slim_position, slim_tiles = _segments(64, 4, 128)[number]
        assert slim_tiles == 2 * tiles
        assert abs(slim_position - position) < query_rows(64, 1)


def test_functions_of_constants_read_no_variables() -> None:
    """The keys of kernels in Triton's cache have the sources of these functions, and not the values
    that they read elsewhere: a cache would keep kernels of an earlier table (M15)."""
    kind, found, wrong = type(query_rows), set(), []
    for module in pkgutil.walk_packages(attnlib.ops.triton.__path__, "attnlib.ops.triton."):
        for function in vars(importlib.import_module(module.name)).values():
            if not isinstance(function, kind):
                continue
            found.add(function)
            known = function.fn.__globals__
            values = {name: known[name] for name in function.fn.__code__.co_names if name in known}
            wrong += [
                f"{function.fn.__name__} reads {name}"
                for name, value in values.items()
                if not callable(value) and not isinstance(value, ModuleType)
            ]
    assert len(found) > 50
    assert not wrong


def test_device_functions_read_no_constant_of_a_module_object() -> None:
    """The keys have the constants that a device function reads by name, and not those that it reads
    as attributes of a module: a cache would keep kernels of an earlier value."""
    found, wrong = 0, []
    for info in pkgutil.walk_packages(attnlib.ops.triton.__path__, "attnlib.ops.triton."):
        module = importlib.import_module(info.name)
        for function in ast.walk(ast.parse(inspect.getsource(module) or "")):
            if not isinstance(function, ast.FunctionDef) or not any(
                ast.unparse(decorator).endswith(".jit") for decorator in function.decorator_list
            ):
                continue
            found += 1
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    owner = getattr(module, node.value.id, None)
                    is_own = isinstance(owner, ModuleType) and owner.__name__.startswith("attnlib.")
                    if is_own and isinstance(getattr(owner, node.attr), constexpr):
                        wrong.append(f"{function.name} reads {ast.unparse(node)}")
    assert found > 300
    assert not wrong
