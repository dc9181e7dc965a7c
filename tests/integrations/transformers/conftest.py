"""Fixtures: the tests run on the CPU, with the torch backend and interpreted Triton kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads the variable when it decorates a kernel, so it is set before any kernel import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

transformers = pytest.importorskip(
    "transformers", reason="the transformers integration needs transformers"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register attnlib for one test, with validation of every step."""
    import attnlib.integrations.transformers as integration

    transformers.logging.set_verbosity_error()
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    integration.register()
    yield
    integration.unregister()


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Require one backend by ATTNLIB_BACKEND, which also affects the continuous batching thread."""
    name: str = request.param
    if name == "triton":
        pytest.importorskip("triton")
        if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("on a CPU Triton needs TRITON_INTERPRET=1")
    monkeypatch.setenv("ATTNLIB_BACKEND", name)
    return name
