"""Keys of kernels do not depend on what a process launched before."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from tests.fresh_process import run_module, run_program

pytest.importorskip("triton")

PACKAGE = Path(__file__).parents[3] / "attnlib" / "ops" / "triton"
HELPER = """
LIMIT = {limit}

def {name}(score, distance):
    return where(distance < LIMIT, score, score - 1.0)

from attnlib.score_functions import where
"""
SCORE = """
from keys_near import near
from keys_far import far

def score(score, q_pos, k_pos, head, request, aux):
    return near(far(score, q_pos - k_pos), q_pos - k_pos)
"""


def test_keys_are_equal_in_every_order(tmp_path: Path) -> None:
    """Of all entry kernels and score functions, from one thread and from several. Those of a
    function that reads two constants of one name from two modules, too."""
    for name, limit in (("near", 64), ("far", 128)):
        (tmp_path / f"keys_{name}.py").write_text(HELPER.format(name=name, limit=limit))
    (tmp_path / "keys_score.py").write_text(SCORE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run_module("tests.ops.triton.kernel_keys", ["keys_score"], environment, [tmp_path])
    assert done.returncode == 0, done.stderr[-4000:]
    first, *others = (json.loads(line) for line in done.stdout.splitlines())
    assert len(others) == 2 and len(first) > 60
    for keys in others:
        assert keys.keys() == first.keys()
        assert {name for name in first if keys[name] != first[name]} == set()
    assert len(first["copies"]) == 1


AHEAD = """
import json, sys
from importlib import import_module
from attnlib.ops.triton import hopper
from attnlib.ops.triton.launch.settle import settle_keys

def kernels():
    hopper.load()
    modules = "attnlib.ops.triton.hopper.kernels."
    return [getattr(import_module(modules + m), name) for m, name in hopper._KERNELS.items()]

if {ahead}:
    for _ in range(2):
        hopper.load_ahead()
    (thread,) = hopper._LOADING
    if {together}:
        settle_keys(*reversed(kernels()))
    thread.join()
    assert all(kernel.hash is not None for kernel in kernels())
settle_keys(*kernels())
print(json.dumps([kernel.cache_key for kernel in kernels()]))
"""


@pytest.mark.slow
def test_keys_that_are_computed_ahead_are_those_of_launches() -> None:
    """In a thread, also while another one needs the kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    printed = set()
    for ahead, together in ((False, False), (True, False), (True, True)):
        done = run_program(AHEAD.format(ahead=ahead, together=together), environment)
        assert done.returncode == 0, done.stderr[-4000:]
        printed.add(done.stdout)
    assert len(printed) == 1 and len(json.loads(printed.pop())) == 3


def called(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Kernels that a source launches by Triton itself, and names that it gives to `settle_keys`."""
    launched, settled = set(), set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name):
            launched.add(node.func.value.id)
        elif isinstance(node.func, ast.Name) and node.func.id == "settle_keys":
            settled |= {each.id for each in node.args if isinstance(each, ast.Name)}
    return {name for name in launched if name.endswith("_kernel")}, settled


def test_launches_without_bound_launch_settle_keys() -> None:
    launched, missing = set(), set()
    for path in PACKAGE.rglob("*.py"):
        names, settled = called(ast.parse(path.read_text()))
        launched |= names
        missing |= names - settled
    assert len(launched) >= 5 and missing == set()
