"""Fixtures: flashinfer is not installed, and a recorder of the calls of an installed fake."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from attnlib.backends.flashinfer.probe import find_api
from tests.backends import fake_flashinfer as fakes


@pytest.fixture(autouse=True)
def _not_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for loaded in [
        name for name in sys.modules if name == "flashinfer" or name.startswith("flashinfer.")
    ]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # type: ignore[arg-type]  # the documented way to forbid an import
    for variable in (
        "CUDA_HOME",
        "CUDA_PATH",
        "FLASHINFER_NVCC",
        "FLASHINFER_DISABLE_JIT",
        "FLASHINFER_CUDA_ARCH_LIST",
    ):
        monkeypatch.delenv(variable, raising=False)
    find_api.cache_clear()
    yield
    find_api.cache_clear()


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> fakes.Recorder:
    """The calls of an installed fake."""
    record = fakes.Recorder()
    fakes.install(monkeypatch, record)
    return record
