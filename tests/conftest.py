"""Settings of all tests: Triton is interpreted without a GPU; local tuning tables are ignored."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is decorated: set it before a test module imports kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("ATTNLIB_TUNING", "off")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-target",
        action="store_true",
        help="compile every tile table entry for all of its targets instead of one (minutes)",
    )


@pytest.fixture(autouse=True)
def _observers_end_with_the_test() -> Iterator[None]:
    """ATTNLIB_VALIDATE=2 registers an observer for the rest of the process."""
    yield
    from attnlib.instrumentation import OBSERVERS

    OBSERVERS.clear()
