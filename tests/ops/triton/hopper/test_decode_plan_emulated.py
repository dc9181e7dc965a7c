"""Decodes over pages that hold their scales without a GPU: the Gluon kernels, emulated, against
torch (M16)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.triton.cross_compile import compile_in_process
from tests.ops.triton.hopper.emulated_pages import CASES

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Error of an output in units of the largest one of its row: that of the dtype, and half as much
for the weights, which are float16."""


@pytest.fixture(scope="module")
def emulated() -> dict[str, dict[str, Any]]:
    """Every case, in one process that does not interpret Triton."""
    found = compile_in_process("tests.ops.triton.hopper.emulated_pages")
    return {result["case"]: result for result in found}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_emulated_decodes(case: str, emulated: dict[str, dict[str, Any]]) -> None:
    """M4 to M6, M16, P5: outputs, LSEs and rows after the last request. Only early decodes load
    keys before the kernel before has ended, and then by all warps that load no queries."""
    result, dtype = emulated[case], CASES[case].get("dtype", torch.bfloat16)
    assert result["early"] == CASES[case].get("early", []), result
    assert result["error"] <= 1.5 * ROUNDING[dtype] and result["finite"], result
    assert result["lse_error"] <= 2e-5 and result["padding"], result
