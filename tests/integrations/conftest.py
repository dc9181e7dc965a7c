"""Where the models of these tests run: on the CPU, through the torch backend and through the interpreted Triton kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Read by triton when a kernel is decorated, so it has to be there before anything imports the kernels.
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
    """attnlib under its name for one test, checking every step against the contract, and gone afterwards."""
    import attnlib.integrations.transformers as integration

    transformers.logging.set_verbosity_error()
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    integration.register()
    yield
    integration.unregister()


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Insists on one backend the way users do; the variable also reaches the thread of continuous batching."""
    name: str = request.param
    if name == "triton":
        pytest.importorskip("triton")
        if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("on a CPU Triton needs TRITON_INTERPRET=1")
    monkeypatch.setenv("ATTNLIB_BACKEND", name)
    return name
