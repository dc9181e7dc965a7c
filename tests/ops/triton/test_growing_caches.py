"""Nothing compiles while a cache grows: strides do not select kernels."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.fresh_process import run_module

HEAD_SIZES, NUM_OPERATIONS = (64, 40, 20), 12
KERNELS = Path(__file__).parents[3] / "attnlib" / "ops" / "triton" / "kernels"


@pytest.mark.slow
def test_a_growing_cache_compiles_in_its_first_two_steps() -> None:
    """Two kernels at most: rows on 16-byte boundaries, and others (`growing_caches`)."""
    if not any(map(shutil.which, ("gcc", "clang"))):
        pytest.skip("needs a C compiler, as Triton does")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run_module("tests.ops.triton.growing_caches", [], environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(HEAD_SIZES) * NUM_OPERATIONS
    late = {name: steps for name, steps in found.items() if not steps.keys() <= {"0", "1"}}
    assert late == {}


def entry_kernels() -> dict[str, str]:
    """Entry kernel -> its module."""
    return {
        node.name: f"attnlib.ops.triton.kernels.{path.stem}"
        for path in sorted(KERNELS.glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }


@pytest.mark.parametrize(("name", "module"), entry_kernels().items())
def test_strides_neither_are_constants_nor_select_kernels(name: str, module: str) -> None:
    """Every stride of an entry kernel is a runtime argument that Triton does not specialize on."""
    kernel = getattr(importlib.import_module(module), name)
    parameters = inspect.signature(kernel.fn).parameters.values()
    strides = {parameter.name for parameter in parameters if "stride" in parameter.name.lower()}
    constants = {
        parameter.name for parameter in parameters if "constexpr" in str(parameter.annotation)
    }
    unspecialized = getattr(kernel, "kwargs", vars(kernel))["do_not_specialize"] or ()
    assert strides <= set(unspecialized) - constants
