"""Decodes that copy states to shared memory without a GPU: the Gluon kernel, emulated, against the
rules in float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ops.triton.cross_compile import compile_in_process
from tests.ops.triton.hopper.emulated_states import CASES

LIMIT = 5e-3
"""Of outputs that are rounded to bfloat16."""


@pytest.fixture(scope="module")
def emulated() -> dict[str, dict[str, Any]]:
    """Every case, in one process that does not interpret Triton."""
    found = compile_in_process("tests.ops.triton.hopper.emulated_states")
    return {result["case"]: result for result in found}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_emulated_decodes(case: str, emulated: dict[str, dict[str, Any]]) -> None:
    """T2, T9, T12 to T14: outputs over two chunks and of forks, and what stays as it is."""
    result = emulated[case]
    assert all(error < LIMIT for error in result["errors"]), result
    assert result["launches"] == 34, result
    assert result["changed"] == [2, 3] and result["clears"] and result["keeps"], result


@pytest.mark.slow
def test_emulated_decodes_in_one_launch() -> None:
    """The bits of outputs and slots are those of separate launches, over two chunks and a fork."""
    for result in compile_in_process("tests.ops.triton.hopper.emulated_fused_steps"):
        assert not result["differ"] and result["clears"], result
        assert result["launches"] == result["steps"] > 10, result
        assert result["error"] < 2e-2, result  # three roundings


@pytest.mark.slow
def test_emulated_drafts() -> None:
    """T10: steps of up to four tokens, some of which are taken back, and forks of them."""
    for result in compile_in_process("tests.ops.triton.hopper.emulated_states", "--drafts"):
        assert max(result["errors"]) < LIMIT and result["keeps"], result
        assert result["launches"] == result["all"] >= 10, result


@pytest.mark.slow
def test_copies_begin_before_anything_waits() -> None:
    """Speed rules: ptxas puts what waits for new tokens in front of the copies where it may, and
    the copies would wait, too."""
    for result in compile_in_process("tests.ops.triton.hopper.state_copies"):
        assert not result["early"] and result["waits first"], result
