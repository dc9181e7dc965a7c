"""Divided layers on two and four GPUs of one host."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu


def run_ranks(world_size: int, *arguments: str) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    done = subprocess.run(
        [sys.executable, *command, "-m", "tests.parallel.gpu_ranks", *arguments],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("world_size", [2, 4])
def test_results_are_those_of_one_gpu(world_size: int) -> None:
    """X4, X5, X9, X10."""
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    run_ranks(world_size)


def test_two_ranks_on_one_gpu() -> None:
    """X4, X5, X9, X10, without NCCL."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    run_ranks(2, "--one-gpu")
