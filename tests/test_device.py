"""Facts about devices: present, missing and hypothetical ones."""

from __future__ import annotations

import pytest
import torch

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


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(ContractError, match="device='gpu' is not known; use 'cpu', 'cuda'"):
        resolve_device("gpu")
