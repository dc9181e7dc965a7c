"""What `attnlib doctor` says of the Gluon kernels: a Hopper without them is right and slow, and nothing else would tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attnlib.backends.torch import TorchBackend
from attnlib.backends.triton import TritonBackend
from attnlib.cli import doctor, main, subprocess_check
from attnlib.cli.gluon import gluon_remarks
from attnlib.device import DeviceInfo
from attnlib.ops.triton.hopper import loader as gluon
from attnlib.selection.registry import lookup

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")
A100 = DeviceInfo("cuda", 0, (8, 0), name="NVIDIA A100")


class Portable(TritonBackend):
    """Told to keep to plain Triton."""

    config = {"kernels": "portable"}


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[str], Any]], None]]:
    """Replaces how the door imports the Gluon kernels, and forgets afterwards."""

    def replace(load: Callable[[str], Any]) -> None:
        monkeypatch.setattr(gluon, "import_module", load)
        gluon._load.cache_clear()

    yield replace
    gluon._load.cache_clear()


def _gone(name: str) -> Any:
    raise ImportError("cannot import name 'warpgroup_mma'\nfrom a long story")


def test_missing_gluon_is_one_line_with_the_reason_and_what_serves(
    importing: Callable[[Callable[[str], Any]], None],
) -> None:
    importing(_gone)
    (line,) = gluon_remarks(TritonBackend, H200)
    assert (
        "\n" not in line
        and "cannot be imported (ImportError: cannot import name 'warpgroup_mma')" in line
    )
    assert "plain Triton kernels serve every call" in line and "install triton" in line


def test_gluon_that_is_there_and_a_setting_against_it_are_said(
    importing: Callable[[Callable[[str], Any]], None],
) -> None:
    importing(lambda name: object())
    assert gluon_remarks(TritonBackend, H200) == [
        "the Gluon kernels for SM90 can be imported; attnlib explain says which layers they serve"
    ]
    assert gluon_remarks(Portable, H200) == [
        "plain Triton kernels serve every call (kernels=portable)"
    ]


@pytest.mark.parametrize(
    "device",
    [A100, DeviceInfo("cpu"), DeviceInfo("cuda", is_rocm=True), DeviceInfo("cuda")],
    ids=str,
)
def test_other_chips_and_other_backends_have_nothing_to_remark(
    device: DeviceInfo, importing: Callable[[Callable[[str], Any]], None]
) -> None:
    importing(_gone)
    assert gluon_remarks(TritonBackend, device) == [] == gluon_remarks(TorchBackend, H200)


def test_the_doctor_shows_it_under_a_backend_that_works(
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
    assert subprocess_check.check_backend(entry)["remarks"] == [], (
        "what does not run at all has another trouble"
    )
    monkeypatch.setattr(subprocess_check, "smoke_test", lambda backend, device: "ran a batch")
    monkeypatch.setattr(doctor, "_backends", lambda: [subprocess_check.check_backend(entry)])
    assert main(["doctor"]) == 0
    row, remark = capsys.readouterr().out.split("backends\n")[1].splitlines()[:2]
    assert row.endswith("works  ran a batch")
    assert remark.index("the Gluon kernels for SM90 cannot be imported") == row.index("ran a batch")
