"""What holds for every test: Triton is interpreted where there is no GPU, and a developer's own tuning table decides nothing."""

import os

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
