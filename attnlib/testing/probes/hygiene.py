"""H2, H3: a backend minds its process and its device.

H2 (GPU): choosing the backend in a fresh process does not start CUDA, so workers can still be forked.
H3 (GPU): tensors of two devices in one call raise an error that names them; with two GPUs, everything on the second
one works while the first is current.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import torch

from attnlib.errors import ContractError
from attnlib.testing.backend_under_test import Subject
from attnlib.testing.case import Case
from attnlib.testing.outcome import NotRun
from attnlib.testing.probe import Check, Probe
from attnlib.testing.runner import judge, run_case

__all__ = ["PROBES"]

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


def _check_fresh_process(subject: Subject) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _SELECT, subject.label],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == 7:
        return (
            "loading the backend and asking what it supports starts CUDA; forked workers would fail"
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotRun(f"a fresh process cannot load {subject.label!r} by that name: {last}")
    return ""


def _check_mixed_devices(subject: Subject, case: Case) -> str:
    from attnlib.layer import Attention

    step, elsewhere = case.step(subject.device), case.step("cpu")
    layer = Attention(step.spec, backend=subject.backend, device=subject.device)
    metadata = subject.backend.make_builder(step.spec, subject.device).build(0, step.common())
    try:
        layer(step.inputs.query, step.inputs.key, step.inputs.value, elsewhere.cache(), metadata)
    except ContractError as error:
        return (
            ""
            if "cpu" in str(error) and "cuda" in str(error)
            else f"the error does not name both devices: {error}"
        )
    return "a cache on the CPU and a query on the GPU do not raise"


def _check_second_gpu(subject: Subject, case: Case) -> str:
    if torch.cuda.device_count() < 2:
        raise NotRun("needs two GPUs")
    second = torch.device("cuda", 1)
    with torch.cuda.device(0):
        return judge(case, run_case(subject.backend, case, second), second)


def _process(subject: Subject) -> Iterator[Check]:
    yield Check("fresh-process", lambda: _check_fresh_process(subject))


def _devices(subject: Subject) -> Iterator[Check]:
    case = subject.case(batch="mixed", needs_lse=False)
    yield Check("mixed-devices", lambda: _check_mixed_devices(subject, case), case)
    yield Check("second-gpu", lambda: _check_second_gpu(subject, case), case)


PROBES = (
    Probe("H2", "choosing a backend does not start CUDA", _process, needs_gpu=True),
    Probe("H3", "the right device, or an error that names both", _devices, needs_gpu=True),
)
