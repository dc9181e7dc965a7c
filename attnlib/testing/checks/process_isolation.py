"""H2 and H3 (GPU): effects on the process and selection of the device.

H2: selecting the backend in a new process does not initialize CUDA, so that workers can be forked.
H3: tensors on two devices in one call raise an error that names both devices. With two GPUs, the
    backend computes on the second one while the first one is current.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch

from attnlib.errors import ContractError
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.outcome import NotRun
from attnlib.testing.runner import compare_with_oracle, run_case

__all__ = ["CHECKS"]

_SELECT = """
import sys, torch
from attnlib.device import resolve_device
from attnlib.spec import AttentionSpec
from attnlib.testing.backend_under_test import load_backend
backend = load_backend(sys.argv[1])
spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, block_size=16)
backend.validate_configuration(spec, "cuda:0")
backend.unavailable(resolve_device("cuda:0"))
sys.exit(7 if torch.cuda.is_initialized() else 0)
"""


def _check_fresh_process(target: BackendUnderTest) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _SELECT, target.label],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == 7:
        return "loading the backend or querying its support initializes CUDA; forked workers fail"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotRun(f"a fresh process cannot load {target.label!r} by that name: {last}")
    return ""


def _check_mixed_devices(target: BackendUnderTest, case: Case) -> str:
    from attnlib.layer import Attention

    step, elsewhere = case.materialize(target.device), case.materialize("cpu")
    layer = Attention(step.spec, backend=target.backend, device=target.device)
    metadata = target.backend.make_builder(step.spec, target.device).build(0, step.common())
    try:
        layer(step.inputs.query, step.inputs.key, step.inputs.value, elsewhere.cache(), metadata)
    except ContractError as error:
        return (
            ""
            if "cpu" in str(error) and "cuda" in str(error)
            else f"the error does not name both devices: {error}"
        )
    return "a CPU cache with a GPU query does not raise an error"


def _check_second_gpu(target: BackendUnderTest, case: Case) -> str:
    if torch.cuda.device_count() < 2:
        raise NotRun("needs two GPUs")
    second = torch.device("cuda", 1)
    with torch.cuda.device(0):
        return compare_with_oracle(case, run_case(target.backend, case, second), second)


def _process(target: BackendUnderTest) -> Iterator[CheckCase]:
    yield CheckCase("fresh-process", partial(_check_fresh_process, target))


def _devices(target: BackendUnderTest) -> Iterator[CheckCase]:
    case = target.case(batch="mixed", needs_lse=False)
    yield CheckCase("mixed-devices", partial(_check_mixed_devices, target, case), case)
    yield CheckCase("second-gpu", partial(_check_second_gpu, target, case), case)


CHECKS = (
    Check("H2", "selecting a backend does not initialize CUDA", _process, needs_gpu=True),
    Check("H3", "correct device, or an error that names both devices", _devices, needs_gpu=True),
)
