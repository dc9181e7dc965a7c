"""What `attnlib doctor` reports about the Gluon kernels on Hopper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attnlib.backends.torch import TorchBackend
from attnlib.backends.triton import TritonBackend
from attnlib.cli import doctor, main, subprocess_check
from attnlib.cli.gluon import gluon_remarks
from attnlib.device import DeviceInfo
from attnlib.ops.triton import hopper
from attnlib.selection.registry import lookup

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")
A100 = DeviceInfo("cuda", 0, (8, 0), name="NVIDIA A100")


class Portable(TritonBackend):
    """Configured for the portable kernels."""

    config = {"kernels": "portable"}


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[str], Any]], None]]:
    """Replaces the import of the Gluon kernels during a test."""

    def replace(load: Callable[[str], Any]) -> None:
        monkeypatch.setattr(hopper, "import_module", load)
        hopper._load.cache_clear()

    yield replace
    hopper._load.cache_clear()


def _gone(name: str) -> Any:
    raise ImportError("cannot import name 'warpgroup_mma'\nsecond line of the message")


def test_a_failed_import_is_one_line_with_the_reason(
    importing: Callable[[Callable[[str], Any]], None],
) -> None:
    importing(_gone)
    (line,) = gluon_remarks(TritonBackend, H200)
    assert (
        "\n" not in line
        and "cannot be imported (ImportError: cannot import name 'warpgroup_mma')" in line
    )
    assert "slower portable Triton kernels" in line and "install triton" in line


def test_a_successful_import_and_a_configuration_are_reported(
    importing: Callable[[Callable[[str], Any]], None],
) -> None:
    importing(lambda name: object())
    assert gluon_remarks(TritonBackend, H200) == [
        "Hopper kernels (Gluon) can be imported; attnlib explain shows which layers use them"
    ]
    assert gluon_remarks(Portable, H200) == [
        "uses the portable Triton kernels only (configured: kernels=portable)"
    ]


@pytest.mark.parametrize(
    "device",
    [A100, DeviceInfo("cpu"), DeviceInfo("cuda", is_rocm=True), DeviceInfo("cuda")],
    ids=str,
)
def test_other_gpus_and_other_backends_have_no_remark(
    device: DeviceInfo, importing: Callable[[Callable[[str], Any]], None]
) -> None:
    importing(_gone)
    assert gluon_remarks(TritonBackend, device) == [] == gluon_remarks(TorchBackend, H200)


def test_the_doctor_prints_it_below_a_backend_that_works(
    importing: Callable[[Callable[[str], Any]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    importing(_gone)
    monkeypatch.setattr(subprocess_check, "resolve_device", lambda device: H200)
    monkeypatch.setattr(subprocess_check, "availability", lambda entry, device: (TritonBackend, []))
    entry = lookup("triton")
    assert entry is not None
    monkeypatch.setattr(
        subprocess_check, "smoke_test", lambda backend, device: "failed: RuntimeError"
    )
    assert subprocess_check.check_backend(entry)["remarks"] == [], "only for a backend that works"
    monkeypatch.setattr(subprocess_check, "smoke_test", lambda backend, device: "ran a batch")
    monkeypatch.setattr(doctor, "_backends", lambda: [subprocess_check.check_backend(entry)])
    assert main(["doctor"]) == 0
    row, remark = capsys.readouterr().out.split("backends\n")[1].splitlines()[:2]
    assert row.endswith("works  ran a batch")
    assert remark.index("Hopper kernels (Gluon) cannot be imported") == row.index("ran a batch")
