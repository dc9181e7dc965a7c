"""Settings of all tests: Triton is interpreted without a GPU; local tuning tables are ignored."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Read by triton when a kernel is decorated, so it has to be there before any test module imports the kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("ATTNLIB_TUNING", "off")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-target",
        action="store_true",
        help="compile every tile table entry for every target that it is for, not for one of them (minutes)",
    )


@pytest.fixture(autouse=True)
def _observers_end_with_the_test() -> Iterator[None]:
    """ATTNLIB_VALIDATE=2 registers an observer for the rest of the process."""
    yield
    from attnlib.instrumentation import OBSERVERS

    OBSERVERS.clear()
