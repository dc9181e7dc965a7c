"""Attention over selected latents and over two key streams without a GPU: the Gluon kernels,
emulated (M11, M17)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ops.triton.cross_compile import compile_in_process
from tests.ops.triton.hopper import emulated_selected, emulated_streams

ROUNDING = 2.0**-8
"""Error of an output in units of the largest one of its row: that of bfloat16, and half as much for
the weights."""
MODULES = {"selected": emulated_selected.CASES, "streams": emulated_streams.CASES}


@pytest.fixture(scope="module")
def emulated() -> dict[str, dict[str, Any]]:
    """Every case, in processes that do not interpret Triton."""
    names = (f"tests.ops.triton.hopper.emulated_{name}" for name in MODULES)
    found = [result for name in names for result in compile_in_process(name)]
    return {result["case"]: result for result in found}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for cases in MODULES.values() for case in cases])
def test_emulated_lists(case: str, emulated: dict[str, dict[str, Any]]) -> None:
    """Outputs, LSEs and rows after the last request, which have no list; streams also tell over
    how many splits their slots are divided."""
    result = emulated[case]
    assert result["error"] <= 2 * ROUNDING and result["lse_error"] <= 2e-5, result
    assert result["padding"], result
    options = MODULES["streams"].get(case, {})
    assert result.get("splits") == options.get("used", options.get("splits")), result
