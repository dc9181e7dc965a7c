"""Compile the FlashInfer kernels that attnlib uses in parallel, and pack them for other machines.

    python benchmarks/gpu/flashinfer_kernels.py                      # compile, pack into $OUT
    python benchmarks/gpu/flashinfer_kernels.py --sets verify bench --limit-seconds 500
    python benchmarks/gpu/flashinfer_kernels.py --unpack FOLDER      # install packed kernels
    python benchmarks/gpu/flashinfer_kernels.py --list

FlashInfer compiles a module on first use, one after the other, each from ten files. Here all
modules compile at once. Half of the files of a module are kernels for unpaged keys, and half of the
rest are kernels for custom masks; attnlib calls neither. Unless `--full` is given, they are
replaced by entry points that return "not supported". A module that does not compile this way is
compiled completely.

A compiled module goes to `flashinfer/data/aot/<name>/<name>.so`, where FlashInfer looks for
prebuilt kernels, and `attnlib doctor` counts it as prebuilt. Existing modules are not compiled
again, so the script can be stopped and restarted. Packs (`flashinfer_kernels.NN.tar`, at most 15
MiB each, xz inside) are independent of each other.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import io
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PART_BYTES = 15 * 1024 * 1024


class Kernel(NamedTuple):
    """The key of a FlashInfer module. Decodes use the fa2 prefill module (tensor cores)."""

    backend: str
    query: str
    cache: str
    head_size: int
    window: bool = False
    soft_cap: bool = False


B, H, E4, E5 = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
SETS: dict[str, list[Kernel]] = {
    "verify": [
        Kernel("fa2", B, B, 64),
        Kernel("fa3", B, B, 64),
        Kernel("fa2", B, B, 64, window=True),
        Kernel("fa2", B, E4, 64),
        Kernel("fa3", B, B, 64, soft_cap=True),
        Kernel("fa3", B, B, 128),
        Kernel("fa3", B, B, 256),
        Kernel("fa2", B, B, 64, soft_cap=True),
        Kernel("fa2", B, B, 64, window=True, soft_cap=True),
        Kernel("fa2", H, H, 64),
        Kernel("fa3", H, H, 64),
        Kernel("fa2", B, E5, 64),
        Kernel("fa2", B, E4, 128),
        Kernel("fa2", B, E4, 128, window=True),
        Kernel("fa2", H, E4, 128),
        Kernel("fa2", B, B, 128),
        Kernel("fa2", B, B, 256),
        Kernel("fa2", H, H, 64, window=True),
        Kernel("fa2", B, E4, 64, window=True),
        Kernel("fa2", H, H, 64, soft_cap=True),
        Kernel("fa2", B, E5, 64, soft_cap=True),
        Kernel("fa2", B, E5, 64, window=True, soft_cap=True),
    ],
    "decoder": [Kernel("fa2", B, B, 128), Kernel("fa3", B, B, 128)],
    "bench": [
        Kernel("fa2", B, B, 128, window=True),
        Kernel("fa2", B, B, 256),
        Kernel("fa2", B, B, 256, soft_cap=True),
        Kernel("fa2", H, H, 128),
        Kernel("fa3", H, H, 128),
        Kernel("fa2", B, E4, 256),
    ],
}
"""Kernels of the conformance suite, and those that the decoder and `attnlib bench` add.

Tests compare the lists with the kernels that are used.
"""

_STUB_FA2 = """#include <flashinfer/attention/mask.cuh>
#include <flashinfer/pos_enc.cuh>
#include "batch_prefill_config.inc"
namespace flashinfer {
"""
_BODY_FA2 = """template <@FIRST@uint32_t CTA_TILE_Q, uint32_t HEAD_DIM_QK, uint32_t HEAD_DIM_VO,
          PosEncodingMode POS_ENCODING_MODE, bool USE_FP16_QK_REDUCTION, MaskMode MASK_MODE,
          typename AttentionVariant, typename Params>
cudaError_t @NAME@(Params params, typename Params::DTypeO* tmp_v, float* tmp_s, bool enable_pdl,
                   cudaStream_t stream) {
  return cudaErrorNotSupported;
}
"""
_STUB_FA3 = """#include <flashinfer/attention/mask.cuh>
#include <flashinfer/math.cuh>
#include "batch_prefill_sm90_config.inc"
namespace flashinfer {
"""
_BODY_FA3 = """template <uint32_t HEAD_DIM_QK, uint32_t HEAD_DIM_VO, MaskMode MASK_MODE,
          bool LEFT_SLIDING_WINDOW, bool SAME_SCHEDULE_FOR_ALL_HEADS, typename AttentionVariant,
          typename Params>
cudaError_t @NAME@(Params& params, bool enable_pdl, cudaStream_t stream) {
  return cudaErrorNotSupported;
}
"""
_ENTRY = re.compile(r"template cudaError_t\s+(BatchPrefillWith\w+Dispatched).*?;", re.DOTALL)


def is_needed(source: Path) -> bool:
    """True if attnlib can call a kernel of this file: paged keys, and no mask or a causal mask."""
    name = source.name
    return "ragged" not in name and not name.endswith(("_mask_2.cu", "_mask_3.cu"))


def stub_of(sources: list[tuple[str, bool]]) -> str:
    """One source with the entry points of several generated ones, which return "not supported".

    Args:
        sources: (text, True for a custom mask) of each source; all of one module.

    Raises:
        ValueError: a source has no entry points.
    """
    hopper = any("sm90" in text for text, _ in sources)
    names, entries = dict[str, str](), list[str]()  # names with the first template parameter
    for text, custom in sources:
        found = list(_ENTRY.finditer(text))
        if not found:
            raise ValueError(
                "a generated source has no entry points, so this is neither FlashInfer 0.6.12 nor "
                "0.7.2: use --full"
            )
        for match in found:
            # FlashInfer 0.7 added it for paged keys.
            added = "SAME_KV_STRIDES" in match.group(0)
            names[match.group(1)] = "bool SAME_KV_STRIDES, " if added else ""
        entries += [
            match.group(0).replace("use_custom_mask", str(custom).lower()) for match in found
        ]
    body = _BODY_FA3 if hopper else _BODY_FA2
    bodies = [body.replace("@NAME@", n).replace("@FIRST@", first) for n, first in names.items()]
    return "".join(
        [
            _STUB_FA3 if hopper else _STUB_FA2,
            *bodies,
            "\n".join(entries),
            "\n}  // namespace flashinfer\n",
        ]
    )


def without_unused(spec: Any) -> Any:
    """The spec with one stub source instead of the files that attnlib never calls."""
    kept = [source for source in spec.sources if is_needed(source)]
    others = [source for source in spec.sources if not is_needed(source)]
    if not others:
        return spec
    stub = others[0].with_name("stub.cu")
    stub.write_text(stub_of([(source.read_text(), "_mask_2" in source.name) for source in others]))
    return dataclasses.replace(spec, sources=[*kept, stub])


def spec_of(kernel: Kernel) -> Any:
    """The FlashInfer description of the module, with its generated sources."""
    import torch
    from flashinfer.jit.attention import modules

    generate = modules.gen_batch_prefill_module
    if kernel.backend == "fa2":  # 0.7 loads a module for equal strides of keys and values
        generate = getattr(modules, "_gen_batch_prefill_primary_module", generate)
    query, cache = getattr(torch, kernel.query), getattr(torch, kernel.cache)
    size = kernel.head_size
    return generate(
        kernel.backend,
        query,
        cache,
        query,
        torch.int32,
        size,
        size,
        0,
        kernel.window,
        kernel.soft_cap,
        False,
    )


class Builder:
    """Compiles modules with ninja until a deadline."""

    def __init__(self, deadline: float, jobs: int, full: bool) -> None:
        self.deadline, self.jobs, self.full = deadline, jobs, full
        self._print = threading.Lock()

    def log(self, text: str) -> None:
        with self._print:
            print(text, flush=True)

    def build(self, kernel: Kernel) -> bool:
        """Compile and install one module; False if it failed or the deadline has passed."""
        try:
            return self._build(kernel)
        except Exception as error:
            self.log(f"{kernel}: FAILED: {type(error).__name__}: {error}")
            return False

    def _build(self, kernel: Kernel) -> bool:
        spec = spec_of(kernel)
        if spec.is_aot:
            self.log(f"{spec.name}: already installed")
            return True
        began = time.monotonic()
        errors = self._build_trimmed(spec)
        if errors and not self._expired():
            self.log(f"{spec.name}: compiling all files ({errors})")
            errors = self._ninja(spec)
        if errors:
            self.log(f"{spec.name}: NOT BUILT after {time.monotonic() - began:.0f} s: {errors}")
            return False
        spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
        partial = spec.aot_path.with_suffix(".part")
        shutil.copyfile(spec.jit_library_path, partial)
        partial.replace(spec.aot_path)
        self.log(
            f"{spec.name}: {time.monotonic() - began:.0f} s, "
            f"{spec.aot_path.stat().st_size / 2**20:.1f} MiB"
        )
        return True

    def _build_trimmed(self, spec: Any) -> str:
        if self.full:
            return "--full"
        try:
            trimmed = without_unused(spec)
        except ValueError as error:
            return str(error)
        return self._ninja(trimmed) or unresolved(spec.jit_library_path)

    def _expired(self) -> bool:
        return time.monotonic() >= self.deadline

    def _ninja(self, spec: Any) -> str:
        """The last errors of the compiler; "" if it succeeded."""
        if self._expired():
            return "no time left"
        spec.write_ninja()
        command = [
            "ninja",
            "-j",
            str(self.jobs),
            "-C",
            str(spec.build_dir),
            "-f",
            str(spec.ninja_path),
        ]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "no time left"
        if process.returncode == 0:
            return ""
        lines = output.splitlines()
        errors = [line for line in lines if "error" in line.lower()] or lines
        return " | ".join(errors[-4:])[-1500:]


def unresolved(library: Path) -> str:
    """The error of the loader if a library has undefined symbols, else "".

    Symbols are resolved lazily otherwise, and a wrong stub would fail at the first call only.
    """
    try:
        ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        return str(error)
    return ""


def library_folder() -> Path:
    """The folder in which FlashInfer looks for prebuilt modules."""
    from flashinfer.jit import env

    return Path(env.FLASHINFER_AOT_DIR)


def pack(folder: Path, out: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write the modules of `folder` to tar files of at most `part_bytes`; returns their paths."""
    libraries = sorted(folder.glob("*/*.so"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        packed = list(pool.map(lambda path: lzma.compress(path.read_bytes(), preset=6), libraries))
    parts: list[list[tuple[str, bytes]]] = [[]]
    for library, data in zip(libraries, packed, strict=True):
        if (
            parts[-1]
            and sum(len(other) + 2048 for _, other in parts[-1]) + len(data) + 12288 > part_bytes
        ):
            parts.append([])
        parts[-1].append((f"{library.parent.name}/{library.name}.xz", data))
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("flashinfer_kernels.*.tar"):
        old.unlink()
    written = []
    for number, members in enumerate(part for part in parts if part):
        path = out / f"flashinfer_kernels.{number:02d}.tar"
        with tarfile.open(path, "w") as archive:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        written.append(path)
    return written


def unpack(source: Path, folder: Path) -> list[str]:
    """Extract all packs in `source` to `folder` without overwriting.

    Returns the names of new modules.
    """
    names = []
    for part in sorted(source.glob("flashinfer_kernels.*.tar")):
        with tarfile.open(part) as archive:
            for entry in archive:
                target = folder / entry.name.removesuffix(".xz")
                data = archive.extractfile(entry)
                if data is None or target.exists() or ".." in entry.name:
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(lzma.decompress(data.read()))
                names.append(target.name)
    return names


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=["verify", "decoder"])
    parser.add_argument(
        "--modules", type=int, default=8, help="number of modules to compile at once"
    )
    parser.add_argument(
        "--jobs", type=int, default=6, help="number of files of one module to compile at once"
    )
    parser.add_argument(
        "--full", action="store_true", help="also compile the kernels that attnlib never calls"
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=480.0,
        help="time limit of the compilation, without packing",
    )
    parser.add_argument("--arch", default="9.0a", help="default of FLASHINFER_CUDA_ARCH_LIST")
    parser.add_argument(
        "--unpack", type=Path, default=None, help="only extract the packs of this folder"
    )
    parser.add_argument("--list", action="store_true", help="only print the kernels of the sets")
    options = parser.parse_args()
    kernels = list(dict.fromkeys(kernel for name in options.sets for kernel in SETS[name]))
    if options.list:
        print("\n".join(map(str, kernels)))
        return 0
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", options.arch)
    if options.unpack is not None:
        names = unpack(options.unpack, library_folder())
        print(f"{len(names)} modules unpacked into {library_folder()}")
        return 0
    began = time.monotonic()
    builder = Builder(began + options.limit_seconds, options.jobs, options.full)
    with ThreadPoolExecutor(options.modules) as pool:
        done = list(pool.map(builder.build, kernels))
    print(f"{sum(done)} of {len(kernels)} modules in {time.monotonic() - began:.0f} s", flush=True)
    parts = pack(library_folder(), Path(os.environ.get("OUT", ".")))
    print(
        "packed: "
        + ", ".join(f"{part.name} {part.stat().st_size / 2**20:.1f} MiB" for part in parts),
        flush=True,
    )
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
