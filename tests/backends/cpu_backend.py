"""A backend of a GPU package, adapted to run on a CPU over a fake of the package."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from attnlib.backends.base import AttentionBackend
from attnlib.device import DeviceInfo, resolve_device

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")


def on_cpu(
    monkeypatch: pytest.MonkeyPatch,
    backend: type[AttentionBackend],
    metadata_module: Any,
    config: dict[str, Any],
) -> type[AttentionBackend]:
    """The backend on a CPU, which it takes for an H200."""

    def validate(cls: Any, spec: Any, device: Any = None) -> list[str]:
        info = resolve_device(device)
        return super(adapted, cls).validate_configuration(
            spec, H200 if info.type == "cpu" else info
        )

    monkeypatch.setattr(metadata_module, "resolve_device", lambda _: H200)
    body = {
        "capabilities": dataclasses.replace(backend.capabilities, devices=("cpu", "cuda")),
        "config": config,
        "validate_configuration": classmethod(validate),
        "unavailable": classmethod(lambda cls, device: []),
    }
    adapted = type(backend.__name__, (backend,), body)
    return adapted
