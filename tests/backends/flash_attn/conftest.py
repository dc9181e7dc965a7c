"""Fixtures: no FlashAttention is installed, and a recorder of calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attnlib.backends.flash_attn.probe import find_kernels
from tests.backends import fake_flash_attn as fakes


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fakes.nothing_installed(monkeypatch)
    find_kernels.cache_clear()
    yield
    find_kernels.cache_clear()


@pytest.fixture
def record() -> fakes.Recorder:
    return fakes.Recorder()
