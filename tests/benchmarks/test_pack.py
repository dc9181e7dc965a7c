"""`benchmarks/hosts/pack.py` with wheels and a library that the test writes."""

from __future__ import annotations

import struct
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "hosts"
SOFT_CAP = b".text._ZN7cutlass13device_kernel_CollectiveMainloopFwdSm90_4Sm90ELb1ELb0ELb1ELb1E\0"
PLAIN = SOFT_CAP.replace(b"ELb1ELb0ELb1E", b"ELb1ELb0ELb0E")


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import pack

    return pack


def fat_binary(*parts: tuple[int, int, bytes]) -> bytes:
    """Parts of kind, architecture and content."""
    body = b""
    for kind, architecture, content in parts:
        header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(content), 0, 0, 0, 0, architecture)
        body += header.ljust(64, b"\0") + content
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(code: bytes, symbols: bytes) -> bytes:
    """An ELF file with a loaded section of code, and one of symbols that is not loaded."""
    names = b"\0.fat\0.strtab\0.shstrtab\0"
    offset, found = 64, b""
    rows = [(0, 0, 0, 0, 0, 0)]
    for name, flags, content in ((1, 2, code), (6, 0, symbols), (14, 0, names)):
        rows.append((name, 3, flags, 0, offset + len(found), len(content)))
        found += content
    table = b"".join(struct.pack("<IIQQQQIIQQ", *row, 0, 0, 0, 0) for row in rows)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, offset + len(found))
    struct.pack_into("<HHH", header, 0x3A, 64, len(rows), 3)
    return bytes(header) + found + table


CODE = fat_binary(
    (2, 80, b"A" * 8), (2, 90, b"B" * 8), (1, 90, b"C" * 8), (2, 90, SOFT_CAP),
    (2, 90, SOFT_CAP + PLAIN),
)  # fmt: skip
COMPILED_THERE = (
    "tvm_ffi/include/tvm_ffi/any.h", "tvm_ffi/3rdparty/dlpack/include/dlpack/dlpack.h",
    "sglang/kernels/jit/include/sgl_kernel/tensor.h", "sglang/kernels/jit/csrc/rope.cuh",
)  # fmt: skip
"""Sources of kernels that SGLang compiles when it runs."""


def test_libraries_keep_code_for_hopper(pack: Any) -> None:
    """Other code, PTX, kernels with a soft cap alone, and symbols become zeros, and their
    architecture one that Hopper does not run; bytes that only begin like a fat binary do not
    change."""
    inside = struct.pack("<IHHQ", 0xBA55ED50, 9, 16, 8) + b"D" * 8
    left_out = ((2, 120, bytes(8)), (1, 120, bytes(8)), (2, 120, bytes(len(SOFT_CAP))))
    kept = ((2, 90, b"B" * 8), (2, 90, SOFT_CAP + PLAIN))
    code = fat_binary(left_out[0], kept[0], *left_out[1:], kept[1])
    found = pack.shrink(library(CODE + inside, b"symbols"))
    assert found == library(code + inside, bytes(7))
    assert pack.shrink(b"a script") == b"a script"


def test_archives_hold_what_a_run_loads(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "vllm-0.26.0-cp38-abi3-any.whl"
    compiled = library(CODE, b"symbols")
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("vllm/a.py", "vllm/tests/b.py", "vllm/third_party/deep_gemm/c.py", "vllm/d.h"):
            archive.writestr(name, name)
        for name in COMPILED_THERE:
            archive.writestr(name, name)
        archive.writestr("vllm-0.26.0.dist-info/METADATA", "Name: vllm")
        for name in ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so"):
            archive.writestr(name, compiled)
    asked = []

    def download(wheels: Path, *names: str) -> list[Path]:
        asked.append(names)
        return [wheel]

    monkeypatch.setattr(pack, "download", download)
    arguments = ["pack", str(tmp_path / "out"), "vllm-0.26.0", "packages", "sglang-0.5.17"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--present", "numba", "dill"])
    pack.main()
    with tarfile.open(tmp_path / "out" / "vllm-0.26.0.tar.xz") as archive:
        held = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert held == {
        "vllm/a.py": b"vllm/a.py",
        "vllm-0.26.0.dist-info/METADATA": b"Name: vllm",
        "vllm/_C_stable_libtorch.abi3.so": pack.shrink(compiled),
        **{name: name.encode() for name in COMPILED_THERE},
    }
    assert capsys.readouterr().out.splitlines()[-1].startswith("together: ")
    vllm, packages, *sglang = asked
    assert vllm == ("vllm==0.26.0",)
    assert sglang[0][:3] == ("sglang==0.5.17", "sglang-kernel==0.4.5", "transformers==5.12.1")
    assert "numba==" not in " ".join(packages) and "distro" in sglang[1] and "dill" not in sglang[1]
    assert "pydantic==" in " ".join(packages)
    with tarfile.open(tmp_path / "out" / "packages.tar.xz") as archive:
        (name,) = (name for name in archive.getnames() if name.endswith("/entry_points.txt"))
        points = archive.extractfile(name)
        assert points is not None
        lines = points.read().decode().splitlines()
    assert lines[lines.index("[vllm.general_plugins]") + 1] == (
        "attnlib = attnlib.integrations.vllm:register"
    )


def test_versions_are_those_of_the_tests(pack: Any) -> None:
    from tests.hosts.install import SGLANG

    assert tuple(pack.WITH_SGLANG) == SGLANG


def test_wheels_of_what_packages_require(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is required in turn is packed: not what the machine has, extras, or what other
    platforms need."""
    requires = {
        "client": ('transport (>=2)', 'torch', 'shell; extra == "cli"'),
        "transport": ('names<3', 'winnames; sys_platform == "win32"', "client"),
        "names": (),
    }  # fmt: skip
    asked: list[str] = []

    def download(wheels: Path, *names: str) -> list[Path]:
        asked.extend(names)
        found = []
        for name in (pack.Requirement(one).name for one in names):
            lines = "".join(f"Requires-Dist: {one}\n" for one in requires[name])
            found.append(tmp_path / f"{name}-1-py3-none-any.whl")
            with zipfile.ZipFile(found[-1], "w") as archive:
                archive.writestr(f"{name}-1.dist-info/METADATA", f"Name: {name}\n{lines}")
        return found

    monkeypatch.setattr(pack, "download", download)
    found = pack.with_requirements(tmp_path, ["client==1"], {"torch"})
    assert [wheel.name.partition("-")[0] for wheel in found] == ["client", "transport", "names"]
    assert asked == ["client==1", "transport>=2", "names<3"]
