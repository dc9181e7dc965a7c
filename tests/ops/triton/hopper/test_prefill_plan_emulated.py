"""Prefills of heads of 128 to 192 elements without a GPU: the Gluon kernel, emulated, against torch
in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.triton.cross_compile import compile_in_process
from tests.ops.triton.hopper.emulated_prefills import CASES


@pytest.fixture(scope="module")
def emulated() -> dict[str, dict[str, Any]]:
    """Every case, in one process that does not interpret Triton."""
    found = compile_in_process("tests.ops.triton.hopper.emulated_prefills")
    return {result["case"]: result for result in found}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_emulated_prefills(case: str, emulated: dict[str, dict[str, Any]]) -> None:
    """M4 to M6, P5: outputs, LSEs and rows after the last request; two accumulators from 129 on."""
    result, dtype = emulated[case], CASES[case].get("dtype", torch.bfloat16)
    # Weights and outputs are rounded; values are standard normal.
    assert result["error"] <= (2e-2 if dtype == torch.bfloat16 else 3e-3), result
    assert result["lse_error"] <= 1e-4 and result["padding"], result
    size, size_v = CASES[case]["sizes"]
    assert result["columns"] >= max(8 if size > 128 else 0, size_v - 128), result
