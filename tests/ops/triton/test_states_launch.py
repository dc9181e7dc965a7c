"""Launches of state layers: direct ones over a driver that records, and the calls before them."""

from __future__ import annotations

import functools
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
from attnlib.layer import state_checks
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of_cpu
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.states import launch
from attnlib.ops.triton.states.launch import KernelLaunch
from tests.ops.triton.test_driver import direct
from tests.ops.triton.test_sequence import Machine, machine, pytestmark

__all__ = ["machine", "pytestmark"]

KERNEL = functools.partial(print)  # in the place of a kernel, which has a hash
PACKAGE = str(Path(attnlib.__file__).parent)


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], bool]]:
    """Launches by Triton, after which direct ones are possible."""
    found: list[tuple[tuple[Any, ...], bool]] = []

    def run(self: BoundLaunch, arguments: tuple[Any, ...], aligned: bool) -> None:
        found.append((arguments, aligned))
        self._direct = direct(b"ppfii")

    monkeypatch.setattr(BoundLaunch, "by_triton", run)
    monkeypatch.setattr(launch, "LAUNCHES", type(LAUNCHES)())
    return found


def _words(machine: Machine) -> tuple[Any, ...]:
    """The arguments of the last launch."""
    return struct.unpack("<QQfii", b"".join(machine.driver.launches[-1][4]))


def test_batches_share_a_template(machine: Machine, by_triton: list[Any]) -> None:
    """Triton launches once; other integers and addresses need no other template, other floats do.
    The stream is the current one."""
    machine.device, machine.driver.sizes = -1, [8, 8, 4, 4, 4]
    first, other = torch.zeros(16), torch.zeros(32)

    def prepared(*numbers: float) -> KernelLaunch:
        return KernelLaunch(KERNEL, ("constants",), (3, 2), numbers)

    one = prepared(0.5, 7, 8)
    one.run(first, other)
    assert by_triton == [((first, other, 0.5, 7, 8), True)] and not machine.driver.launches
    one.run(other, first)
    assert _words(machine) == (other.data_ptr(), first.data_ptr(), 0.5, 7, 8)
    assert machine.driver.launches[-1][1][:3] == (3, 2, 1)
    prepared(0.5, 9, 10).run(first, other)
    assert _words(machine) == (first.data_ptr(), other.data_ptr(), 0.5, 9, 10)
    assert machine.driver.launches[-1][2] == machine.stream - 1 and len(by_triton) == 1
    prepared(0.25, 9, 10).run(first, other)
    assert len(by_triton) == 2 and len(machine.driver.launches) == 2


def test_triton_launches_what_a_direct_launch_cannot(machine: Machine, by_triton: Any) -> None:
    """Addresses that are not aligned, another current device, and observed launches."""
    machine.device, machine.driver.sizes = -1, [8, 8, 4, 4, 4]
    tensor, odd = torch.zeros(16), torch.zeros(17)[1:]
    prepared = KernelLaunch(KERNEL, ("constants",), (3, 2), (0.5, 7, 8))
    prepared.run(tensor, tensor)
    prepared.run(tensor, odd)
    assert by_triton[-1] == ((tensor, odd, 0.5, 7, 8), False)
    machine.device = 0
    prepared.run(tensor, tensor)
    machine.device, machine.observed = -1, True
    prepared.run(tensor, tensor)
    assert len(by_triton) == 4 and not machine.driver.launches
    machine.observed = False
    prepared.run(tensor, tensor)
    assert len(machine.driver.launches) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the process does not interpret Triton")
@torch.inference_mode()
def test_a_repeated_call_enters_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode of a state layer whose plan is there: checks and launch, without loops in Python."""
    submitted: list[int] = []

    def bind(self: Any, tensors: Any, numbers: Any) -> Any:
        return lambda *given: submitted.append(len(given)) or True

    monkeypatch.setattr(launch._KeptLaunch, "bind", bind)
    # Calls on a GPU do not read the batch.
    monkeypatch.setattr(state_checks, "check_requests", lambda *batch: None)
    spec = attnlib.StateSpec(
        num_heads=2, key_size=16, value_size=16, qk_norm=True, dtype=torch.float32
    )
    h100 = DeviceLimits(132, 232448, 233472, (9, 0), has_fp8=True)
    entered: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_name)

    with limits_of_cpu(h100):
        layer = attnlib.StateLayer(spec, backend="triton", device="cpu")
        cache = attnlib.StateCache.allocate(layer.spec, 2, device="cpu")
        rows, gates = torch.zeros(2, 2, 16), torch.zeros(2, 2)
        output = torch.zeros_like(rows)
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1, 1], [8, 9], device="cpu", state_slots=[0, 1]
        )
        metadata = layer.backend.make_builder(layer.spec, "cpu").build(0, common)
        call = (rows, rows, rows, gates, gates, cache, metadata)
        layer(*call, output=output)
        sys.setprofile(note)
        try:
            layer(*call, output=output)
        finally:
            sys.setprofile(None)
    assert submitted == [18, 18] and len(entered) <= 11, entered
