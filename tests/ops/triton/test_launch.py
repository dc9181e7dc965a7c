"""Bound launches equal Triton's own launches; `recorded_launches` compares both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnlib.ops.triton.heuristics import device
from attnlib.ops.triton.launch.bound import BoundLaunch

ROOT = Path(__file__).parents[3]
CHECKS = [
    "check_random_calls",
    "check_second_call_is_bound",
    "check_hooks_and_knobs_take_effect",
    "check_unknown_versions_use_triton",
    "check_descriptors_are_encoded_once",
    "check_every_call_is_checked",
    "check_plans",
    "check_rotated_calls",
    "check_copied_prefills",
    "check_flash_attn_with_kvcache",
    "check_plans_step_aside",
    "check_changes_between_calls",
    "check_scratch_off_the_boundary",
    "check_scales_in_pages",
    "check_sinks_are_read_at_each_call",
    "check_warmups_encode_all_caches",
    "check_which_kernel_combines",
    "check_replaced_methods",
    "check_files_of_layers",
    "check_files_of_operations",
    "check_bare_launches",
    "check_appended_rows",
    "check_state_layers",
    "check_memory_is_bounded",
]


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Check -> "" or its traceback, from a process that does not interpret Triton."""
    if not any(map(shutil.which, ("gcc", "clang"))):
        pytest.skip("needs a C compiler, as Triton does")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton.recorded_launches"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_bound_launches(results: dict[str, str], check: str) -> None:
    """P1: the same kernels; hooks and unknown versions disable bound launches."""
    assert results[check] == ""


@pytest.mark.slow
def test_every_check_is_listed(results: dict[str, str]) -> None:
    """`CHECKS` names every check of `recorded_launches`."""
    assert sorted(results) == sorted(CHECKS)


@pytest.mark.skipif(not device.INTERPRETED, reason="this process does not interpret Triton")
def test_interpreted_kernels_stay_unbound() -> None:
    """Under the interpreter Triton makes every launch."""
    from attnlib.ops.triton.kernels.slots import slot_mapping_kernel

    constants = {"BLOCK_SIZE": 4, "BLOCK_T": 16, "BLOCK_R": 16, "num_warps": 2}
    bound = BoundLaunch(slot_mapping_kernel, (1, 1, 1), constants)
    starts, lens = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    table = torch.tensor([[3, 5]], dtype=torch.int32)
    for _ in range(2):
        slots = torch.zeros(3, dtype=torch.int64)
        bound.run((starts, lens, table, slots, 1, 3, 2, 2), 0, -1)
        assert slots.tolist() == [20, 21, -1]
    assert not bound.is_direct
