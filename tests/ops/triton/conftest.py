"""Where the Triton kernels run in these tests: on the GPU when there is one, interpreted on the CPU otherwise."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read by triton when a kernel is decorated, so it has to be there before anything imports the kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU here: bfloat16 and device-only behaviour need one")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
