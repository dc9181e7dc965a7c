"""Decodes over latents without a GPU: the Gluon kernels, emulated, against torch (P10, P14)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.triton.cross_compile import compile_in_process
from tests.ops.triton.hopper import emulated_memory
from tests.ops.triton.hopper.emulated_latent_cases import CASES
from tests.ops.triton.hopper.emulated_memory import Barrier, Deadlock, Memory, Products
from tests.ops.triton.hopper.emulated_tensors import Tensor

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Error of an output in units of the largest one of its row: that of the dtype, and half as much
for the weights."""
LSE_ERROR = 2e-5
APART_LSE_ERROR = 4e-3
"""The same where the scales of groups differ by up to 2 ** 24: logits are in the thousands."""


@pytest.fixture(scope="module")
def emulated() -> dict[str, dict[str, Any]]:
    """Every case, in one process that does not interpret Triton."""
    found = compile_in_process("tests.ops.triton.hopper.emulated_latents")
    return {result["case"]: result for result in found}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_emulated_decodes(case: str, emulated: dict[str, dict[str, Any]]) -> None:
    """M4 to M6, P5: outputs, LSEs and rows after the last request."""
    result, dtype = emulated[case], CASES[case].get("dtype", torch.bfloat16)
    assert result["error"] <= 1.5 * ROUNDING[dtype], result
    assert result["lse_error"] <= (APART_LSE_ERROR if "apart" in case else LSE_ERROR), result
    assert result["padding"] and result["same_nan_rows"], result
    assert result["nan_rows"] == ("broken" in CASES[case]) * CASES[case]["heads"], result


def test_the_emulation_finds_waits_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An mbarrier completes a phase when all arrivals and all bytes are there."""
    monkeypatch.setattr(emulated_memory, "WAIT_SECONDS", 0.01)
    barrier = Barrier()
    barrier.init(2)
    barrier.update(1, 64)
    barrier.update(1, 0)
    with pytest.raises(Deadlock):
        barrier.wait(0)
    barrier.update(0, -64)
    barrier.wait(0)
    with pytest.raises(Deadlock):
        barrier.wait(1)


def test_the_emulation_finds_products_that_are_read_early() -> None:
    """Products read shared memory until they are waited for, and have no result before."""
    products = Products()
    memory = Memory(torch.ones(16, 8))
    ones = Tensor(torch.ones(4, 16))
    result = products.issue(ones, memory, Tensor(torch.zeros(4, 8)), True)
    with pytest.raises(AssertionError, match="before it was waited for"):
        _ = result + 1
    memory.content.fill_(2.0)
    products.wait(0)
    assert (result.value == 32.0).all()
