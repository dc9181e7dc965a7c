"""Device limits that the heuristics use."""

from __future__ import annotations

import pytest
import torch

from attnlib.errors import BackendUnavailableError
from attnlib.ops.triton.heuristics import device as device_module
from attnlib.ops.triton.heuristics.device import (
    INTERPRETER_LIMITS,
    DeviceLimits,
    device_guard,
    limits_of,
    programmatic_launch,
)


def test_interpreter_has_fixed_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """H1: under the interpreter a CPU has the limits of a fixed chip without float8."""
    monkeypatch.setattr(device_module, "INTERPRETED", True)
    assert limits_of(torch.empty(1)) is INTERPRETER_LIMITS
    assert not INTERPRETER_LIMITS.has_fp8


def test_cpu_tensor_without_interpreter_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """E: the error names the device and the next action."""
    monkeypatch.setattr(device_module, "INTERPRETED", False)
    with pytest.raises(
        BackendUnavailableError,
        match=r"a tensor on cpu; move it to a GPU, or set TRITON_INTERPRET=1",
    ):
        limits_of(torch.empty(1))


def test_matrix_instructions_of_chips() -> None:
    """Hopper and data-center Blackwell are asynchronous; consumer Blackwell is not."""

    def products(capability: tuple[int, int], is_amd: bool = False) -> str:
        return DeviceLimits(1, 1, 1, capability, False, is_amd).products

    assert products((9, 0)) == products((10, 0)) == "async"
    assert products((8, 0)) == products((8, 9)) == products((12, 0)) == "sync"
    assert products((0, 0), is_amd=True) == "mfma"


def test_programmatic_launch_of_small_grids_on_hopper() -> None:
    hopper = DeviceLimits(132, 227 << 10, 228 << 10, (9, 0), True)
    assert programmatic_launch(hopper)["PDL"] and programmatic_launch(hopper, 2048)["launch_pdl"]
    assert programmatic_launch(hopper, 8192) == {"PDL": False}
    assert programmatic_launch(INTERPRETER_LIMITS) == {"PDL": False}


def test_device_guard_does_nothing_on_a_cpu() -> None:
    """H3: launches run under a guard for the tensor's device; a CPU tensor needs none."""
    with device_guard(torch.empty(1)) as nothing:
        assert nothing is None


def test_the_current_device_is_the_c_function_of_torch() -> None:
    """H3: it is queried at every call; torch without CUDA has only the public function."""
    own = getattr(torch._C, "_cuda_getDevice", None)
    assert device_module.current_device is (own or torch.cuda.current_device)


@pytest.mark.gpu
def test_a_gpu_is_the_current_device() -> None:
    """The short cut says what torch's public function says."""
    assert device_module.current_device() == torch.cuda.current_device()


@pytest.mark.gpu
def test_limits_of_a_gpu() -> None:
    """They are read from the device once."""
    tensor = torch.empty(1, device="cuda")
    limits = limits_of(tensor)
    assert limits is limits_of(tensor)
    assert limits.num_sms > 0 and limits.shared_memory >= 48 * 1024
