"""Pack vLLM and SGLang for a GPU machine without a network, in archives as small as possible.

    python benchmarks/hosts/pack.py OUT packages vllm-0.26.0
    python benchmarks/hosts/pack.py OUT packages vllm-0.33.0 sglang-0.5.17 --wheels DIR

A run of vLLM needs `packages` and its release; SGLang needs `packages`, its release, and for `fa3`
the release of vLLM whose FlashAttention 3 it runs (`sglang_fa3.py`). On the machine, in the folder
of the archives, with folders apart, because releases of SGLang bring another transformers:

    for one in *.tar.xz; do python3 -m tarfile -e $one ${one%.tar.xz}; done
    export PYTHONPATH=$PWD/vllm-0.26.0:$PWD/packages  # or $PWD/sglang-0.5.17:$PWD/packages

The machine has a Hopper GPU, CPython 3.12 on x86-64, torch 2.11, triton 3.6, transformers 5.17,
and the packages of --present. `packages` has what vLLM and SGLang import besides
(`requirements.txt` of the tests of hosts), what that requires in turn, and the entry points of
attnlib, which a clone on PYTHONPATH lacks. Of compiled libraries an archive has only what a run
loads, and in them the code for Hopper: other code is replaced by zeros, as are symbols for
debuggers and FlashAttention's kernels with a soft cap. A kernel that was left out fails when it is
launched. Models with experts need `_moe_C`, which is not packed. --wheels keeps the downloads.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from email.parser import HeaderParser
from importlib.metadata import distribution
from pathlib import Path

from hopper_code import shrink
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "tests" / "hosts" / "requirements.txt"
PRESENT = (
    "aiohappyeyeballs", "aiohttp", "aiosignal", "annotated-doc", "anyio", "attrs", "certifi",
    "charset-normalizer", "click", "cloudpickle", "einops", "frozenlist", "fsspec", "h11",
    "httpcore", "httpx", "huggingface_hub", "idna", "llvmlite", "multidict", "numba", "numpy",
    "pillow", "prometheus_client", "propcache", "psutil", "py-cpuinfo", "pygments", "pyyaml",
    "regex", "requests", "safetensors", "six", "tokenizers", "torch", "tqdm", "transformers",
    "triton", "urllib3", "uvloop", "yarl",
)  # fmt: skip
"""Requirements that the machine has."""
MACHINE = {
    "python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux",
    "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix",
    "implementation_name": "cpython", "platform_python_implementation": "CPython", "extra": "",
}  # fmt: skip
"""Its markers."""
WITH_SGLANG = {
    "0.5.17": ("sglang-kernel==0.4.5", "transformers==5.12.1", "tokenizers==0.22.2"),
    "0.5.23": ("sglang-kernel==0.4.10",),
}
"""Release -> the wheel of its operations, and packages of which the machine has other versions."""
MORE_OF_SGLANG = (
    "dill==0.4.1", "distro", "easydict", "gguf==0.19.0", "interegular", "python-multipart",
    "setproctitle", "uvicorn",
)  # fmt: skip
LIBRARIES = re.compile(
    r"^vllm/(_C_stable_libtorch|cumem_allocator|spinloop|vllm_flash_attn/_vllm_fa3_C)\.abi3\.so$"
    r"|^sgl_kernel/(sm90/common_ops|spatial_ops)\.abi3\.so$"
)
"""Compiled files of engines that are packed."""
SKIPPED = re.compile(
    r"(^|/)(tests?|benchmarks?|docs|__pycache__)/|\.(pyi|a|rs|js|css|map|svg|png|html)$"
    r"|^(?!(tvm_ffi/(include|3rdparty/dlpack)|sglang/kernels/jit)/).*\.(h|hpp|cuh?|inl)$"
    r"|^vllm/(vllm-rs$|third_party/(deep_gemm|fmha_sm100|flashmla|qutlass|tml_fa4)/)"
    r"|\.data/|device_name=(?!NVIDIA_H[12]00)[^/]*\.json$|/RECORD$"
)
PLATFORMS = (
    *(f"manylinux_2_{n}_x86_64" for n in (5, 17, 24, 27, 28, 31, 34, 35)),
    *("manylinux1_x86_64", "manylinux2014_x86_64", "any"),
)  # fmt: skip


def download(wheels: Path, *names: str) -> list[Path]:
    """The wheels of packages, without their requirements; those that are there are used."""
    wheels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp"]
    for kind, values in (("abi", ("cp312", "abi3", "none")), ("platform", PLATFORMS)):
        command += [part for value in values for part in (f"--{kind}", value)]
    found = []
    for name in names:
        with tempfile.TemporaryDirectory(dir=wheels) as folder:
            subprocess.run([*command, "--find-links", wheels, "--dest", folder, name], check=True)
            (wheel,) = Path(folder).iterdir()
            found.append(wheel.rename(wheels / wheel.name))
    return found


def files_of(wheel: Path) -> Iterator[tuple[str, bytes, bool]]:
    """What is packed of a wheel: name, content, and whether it may be executed."""
    engine = wheel.name.startswith(("vllm-", "sglang-", "sglang_kernel-"))
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", entry.filename)
            is_library = re.search(r"\.so(\.[\d.]+)?$", name) is not None
            if entry.is_dir() or SKIPPED.search(name):
                continue
            if is_library and engine and not LIBRARIES.match(name):
                continue
            data = archive.read(entry)
            is_program = bool(entry.external_attr >> 16 & 0o100)
            yield name, shrink(data) if is_library else data, is_program


def requirements_of(wheel: Path) -> dict[str, str]:
    """What a wheel needs on the machine: name -> requirement, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    found = map(Requirement, metadata.get_all("Requires-Dist", []))
    return {
        canonicalize_name(one.name): f"{one.name}{one.specifier}"
        for one in found
        if one.marker is None or one.marker.evaluate(MACHINE)
    }


def with_requirements(wheels: Path, names: Sequence[str], known: set[str]) -> list[Path]:
    """The wheels of packages and of all that they require in turn, besides those known."""
    known = known | {canonicalize_name(Requirement(name).name) for name in names}
    found = new = download(wheels, *names)
    while new:
        wanted = {k: v for wheel in new for k, v in requirements_of(wheel).items()}
        missing = [one for name, one in wanted.items() if name not in known]
        known |= set(wanted)
        new = download(wheels, *missing) if missing else []
        found = found + new
    return found


def wheels_of(part: str, wheels: Path, present: Iterable[str]) -> list[Path]:
    """The wheels of an archive."""
    engine, _, version = part.rpartition("-")
    known = {canonicalize_name(name) for name in present}
    lines = (line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines())
    listed = {canonicalize_name(Requirement(line).name): line for line in lines if line}
    if part == "packages":
        return with_requirements(wheels, [listed[name] for name in listed.keys() - known], known)
    if engine == "vllm":
        return download(wheels, f"{engine}=={version}")
    operations = download(wheels, f"{engine}=={version}", *WITH_SGLANG[version])
    more = [one for one in MORE_OF_SGLANG if Requirement(one).name not in known]
    return operations + with_requirements(wheels, more, known | listed.keys())


def entry_points() -> dict[str, tuple[bytes, bool]]:
    """The files with which engines find attnlib's plug-ins."""
    own = distribution("attnlib")
    texts = {name: own.read_text(name) or "" for name in ("METADATA", "entry_points.txt")}
    folder = f"attnlib-{own.version}.dist-info"
    return {f"{folder}/{name}": (text.encode(), False) for name, text in texts.items()}


def pack(part: str, out: Path, wheels: Path, present: Iterable[str]) -> Path:
    """Write the archive of a part."""
    files: dict[str, tuple[bytes, bool]] = {}
    for wheel in wheels_of(part, wheels, present):
        for name, data, executable in files_of(wheel):
            files.setdefault(name, (data, executable))
    if part == "packages":
        files.update(entry_points())
    target = out / f"{part}.tar.xz"
    # Files of one kind follow each other, which compresses better.
    order = sorted(files, key=lambda name: (Path(name).suffix, name))
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for name in order:
            data, executable = files[name]
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755 if executable else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return target


def main() -> None:
    """Parse the command line, and write the archives."""
    engines = [f"vllm-{version}" for version in ("0.26.0", "0.33.0")]
    engines += [f"sglang-{version}" for version in WITH_SGLANG]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the archives")
    parser.add_argument("parts", nargs="+", choices=["packages", *engines])
    parser.add_argument("--wheels", type=Path, help="folder of downloads; default: a temporary one")
    parser.add_argument("--present", nargs="*", default=PRESENT, help="packages of the machine")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        total = 0
        for part in options.parts:
            wheels = options.wheels or Path(folder)
            archive = pack(part, options.out, wheels, options.present)
            total += (size := archive.stat().st_size)
            print(f"{archive.name}: {size / 2**20:.1f} MiB", flush=True)
        print(f"together: {total / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
