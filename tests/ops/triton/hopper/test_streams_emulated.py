"""Attention over two key streams without a GPU: the Gluon kernel, emulated (M17)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ops.triton.cross_compile import compile_in_process
from tests.ops.triton.hopper.emulated_streams import CASES

ROUNDING = 2.0**-8
"""Error of an output in units of the largest one of its row: that of bfloat16, and half as much for
the weights."""


@pytest.fixture(scope="module")
def emulated() -> dict[str, dict[str, Any]]:
    """Every case, in one process that does not interpret Triton."""
    found = compile_in_process("tests.ops.triton.hopper.emulated_streams")
    return {result["case"]: result for result in found}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_emulated_streams(case: str, emulated: dict[str, dict[str, Any]]) -> None:
    """Outputs, LSEs and rows after the last request, of as many splits as the case names."""
    result = emulated[case]
    assert result["error"] <= 1.5 * ROUNDING and result["lse_error"] <= 2e-5, result
    assert result["padding"] and result["splits"] == CASES[case]["splits"], result
