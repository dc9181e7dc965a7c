"""Facts about devices: present, missing and hypothetical ones."""

from __future__ import annotations

import pytest
import torch

import attnlib
from attnlib import device
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import ContractError


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_cuda_device_is_reported() -> None:
    """The facts about "cuda" on a machine without a GPU say that it is missing."""
    assert (
        resolve_device("cuda").is_missing
        and not resolve_device("cpu").is_missing
        and not resolve_device("sm_90").is_missing
    )


def test_the_current_device_is_queried_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """D28: "cuda" follows `torch.cuda.set_device`."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(device, "_cuda_device_info", lambda index: DeviceInfo("cuda", index))
    assert resolve_device("cuda").index == 0
    current[0] = 1
    assert resolve_device("cuda").index == 1 and resolve_device("cuda:0").index == 0


def test_a_hypothetical_device_names_its_architecture() -> None:
    info = resolve_device("sm_90")
    assert info.capability == (9, 0) and info.is_hypothetical and info.unavailable_reasons == []
    assert str(info) == "sm_90 (hypothetical device)"
    assert resolve_device("sm_100a").capability == (10, 0)


@pytest.mark.parametrize(
    ("name", "driver_name", "capability"),
    [
        ("NVIDIA H100 NVL", "NVIDIA H100 NVL", (9, 0)),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", (9, 0)),
        ("h200", "NVIDIA H200", (9, 0)),
        ("nvidia gh200 480GB", "NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", (8, 0)),
        ("B200", "NVIDIA B200", (10, 0)),
    ],
)
def test_a_device_of_another_machine_by_name(
    name: str, driver_name: str, capability: tuple[int, int]
) -> None:
    """It gets the driver's name, by which tables of measurements are found."""
    info = resolve_device(name)
    assert info == DeviceInfo("cuda", 0, capability, name=driver_name, is_hypothetical=True)
    architecture = f"sm_{capability[0]}{capability[1]}"
    assert str(info) == f"{driver_name}, {architecture} (hypothetical device)"


@pytest.mark.parametrize("name", ["gpu", "NVIDIA", "NVIDIA H1000", "RTX H100", "sm_901", ""])
def test_an_unknown_device_is_an_error(name: str) -> None:
    """The message lists the names that are known."""
    with pytest.raises(
        ContractError, match=f"device='{name}' is not known; use 'cpu', 'cuda'.* H100, H200, "
    ):
        resolve_device(name)


@pytest.mark.parametrize(
    ("name", "shown", "chosen"),
    [
        ("gfx942", "gfx942, ROCm (hypothetical device)", {"triton", "torch", None}),
        ("gfx90a", "gfx90a, ROCm (hypothetical device)", {"triton", "torch", None}),
        ("xpu", "xpu", {"torch"}),
        ("xpu:1", "xpu:1", {"torch"}),
        ("mps", "mps", {"torch"}),
        ("hpu", "hpu", {None}),
        ("meta", "meta", {None}),
        ("privateuseone", "privateuseone", {None}),
    ],
)
def test_every_device_that_torch_knows_gets_an_answer(
    name: str, shown: str, chosen: set[str | None]
) -> None:
    info = resolve_device(name)
    assert str(info).startswith(shown)
    assert name.partition(":")[2] in ("", str(info.index))
    spec = attnlib.AttentionSpec(num_heads=8, head_size=64, dtype=torch.float16)
    report = attnlib.explain(spec, name)
    assert report.chosen in chosen and str(report)
