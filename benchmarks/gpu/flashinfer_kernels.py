"""Compile the FlashInfer kernels that the exam needs, side by side, and pack them so that a later machine need not.

    python benchmarks/gpu/flashinfer_kernels.py                          # compile what is missing, pack into $OUT
    python benchmarks/gpu/flashinfer_kernels.py --sets exam decoder bench --limit-seconds 500
    python benchmarks/gpu/flashinfer_kernels.py --unpack FOLDER          # put packed kernels where FlashInfer looks first
    python benchmarks/gpu/flashinfer_kernels.py --list

FlashInfer compiles a module at its first use, one after the other behind file locks, each from ten files. Here all modules compile
at once. Half of a module's files are kernels for unpaged keys, and half of the rest serve custom masks, neither of which attnlib ever
calls: unless `--full` is given they are replaced by entries that report "not supported". Should such a module not compile, it is
compiled whole.

A finished module goes to `flashinfer/data/aot/<name>/<name>.so`, the place for prebuilt kernels: FlashInfer loads it from there without
asking ninja, and `attnlib doctor` counts it as prebuilt. Existing ones are left alone, so the script can be stopped and run again.
Packs (`flashinfer_kernels.NN.tar`, at most 15 MiB each, xz inside) are written under $OUT and can be unpacked one by one.
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
    """What decides which module FlashInfer loads; decodes run on the fa2 prefill module (tensor cores)."""

    backend: str
    query: str
    cache: str
    head_size: int
    window: bool = False
    soft_cap: bool = False


B, H, E4, E5 = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
SETS: dict[str, list[Kernel]] = {
    "exam": [
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
    ],
    "decoder": [Kernel("fa2", B, B, 128), Kernel("fa3", B, B, 128)],
    "bench": [Kernel("fa2", B, B, 128, window=True), Kernel("fa2", B, B, 256), Kernel("fa2", B, B, 256, soft_cap=True), Kernel("fa2", B, E4, 128),
              Kernel("fa2", H, H, 128), Kernel("fa3", H, H, 128)],
}  # fmt: skip
"""What the exam over the adapter plans for, and what the decoder and the rows of `attnlib bench` add; tests hold the lists against exam and rows."""

_STUB_FA2 = """#include <flashinfer/attention/mask.cuh>
#include <flashinfer/pos_enc.cuh>
#include "batch_prefill_config.inc"
namespace flashinfer {
"""
_BODY_FA2 = """template <uint32_t CTA_TILE_Q, uint32_t HEAD_DIM_QK, uint32_t HEAD_DIM_VO, PosEncodingMode POS_ENCODING_MODE,
          bool USE_FP16_QK_REDUCTION, MaskMode MASK_MODE, typename AttentionVariant, typename Params>
cudaError_t @NAME@(Params params, typename Params::DTypeO* tmp_v, float* tmp_s, bool enable_pdl, cudaStream_t stream) {
  return cudaErrorNotSupported;
}
"""
_STUB_FA3 = """#include <flashinfer/attention/mask.cuh>
#include <flashinfer/math.cuh>
#include "batch_prefill_sm90_config.inc"
namespace flashinfer {
"""
_BODY_FA3 = """template <uint32_t HEAD_DIM_QK, uint32_t HEAD_DIM_VO, MaskMode MASK_MODE, bool LEFT_SLIDING_WINDOW,
          bool SAME_SCHEDULE_FOR_ALL_HEADS, typename AttentionVariant, typename Params>
cudaError_t @NAME@(Params& params, bool enable_pdl, cudaStream_t stream) {
  return cudaErrorNotSupported;
}
"""
_ENTRY = re.compile(r"template cudaError_t\s+(BatchPrefillWith\w+Dispatched).*?;", re.DOTALL)


def is_needed(source: Path) -> bool:
    """Whether attnlib can reach a kernel of this file: paged keys, and no mask or a causal one."""
    name = source.name
    return "ragged" not in name and not name.endswith(("_mask_2.cu", "_mask_3.cu"))


def stub_of(sources: list[tuple[str, bool]]) -> str:
    """One source with the entries of several generated ones, and a body that reports "not supported" in place of each kernel.

    Args:
        sources: (text, whether it is of the custom mask) of each; all of one module.
    """
    hopper = any("sm90" in text for text, _ in sources)
    names, entries = dict[str, None](), list[str]()
    for text, custom in sources:
        found = list(_ENTRY.finditer(text))
        if not found:
            raise ValueError(
                "a generated source without entries: another FlashInfer than 0.6.12? use --full"
            )
        names.update({entry.group(1): None for entry in found})
        entries += [
            entry.group(0).replace("use_custom_mask", str(custom).lower()) for entry in found
        ]
    bodies = [(_BODY_FA3 if hopper else _BODY_FA2).replace("@NAME@", name) for name in names]
    return "".join(
        [
            _STUB_FA3 if hopper else _STUB_FA2,
            *bodies,
            "\n".join(entries),
            "\n}  // namespace flashinfer\n",
        ]
    )


def lean(spec: Any) -> Any:
    """The spec with one stub in place of the files that attnlib never calls."""
    kept = [source for source in spec.sources if is_needed(source)]
    others = [source for source in spec.sources if not is_needed(source)]
    if not others:
        return spec
    stub = others[0].with_name("stub.cu")
    stub.write_text(stub_of([(source.read_text(), "_mask_2" in source.name) for source in others]))
    return dataclasses.replace(spec, sources=[*kept, stub])


def spec_of(kernel: Kernel) -> Any:
    """FlashInfer's own description of the module, its sources written."""
    import torch
    from flashinfer.jit import gen_batch_prefill_module

    query, cache = getattr(torch, kernel.query), getattr(torch, kernel.cache)
    size = kernel.head_size
    return gen_batch_prefill_module(
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
    """Runs ninja for one module after the other within a deadline."""

    def __init__(self, deadline: float, jobs: int, full: bool) -> None:
        self.deadline, self.jobs, self.full = deadline, jobs, full
        self._print = threading.Lock()

    def say(self, text: str) -> None:
        with self._print:
            print(text, flush=True)

    def build(self, kernel: Kernel) -> bool:
        """Compile and place one module; False when it failed or time was up."""
        try:
            return self._build(kernel)
        except Exception as error:
            self.say(f"{kernel}: FAILED: {type(error).__name__}: {error}")
            return False

    def _build(self, kernel: Kernel) -> bool:
        spec = spec_of(kernel)
        if spec.is_aot:
            self.say(f"{spec.name}: already there")
            return True
        began = time.monotonic()
        errors = self._lean(spec)
        if errors and not self._late():
            self.say(f"{spec.name}: compiling it whole ({errors})")
            errors = self._ninja(spec)
        if errors:
            self.say(f"{spec.name}: NOT BUILT after {time.monotonic() - began:.0f} s: {errors}")
            return False
        spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
        waiting = spec.aot_path.with_suffix(".part")
        shutil.copyfile(spec.jit_library_path, waiting)
        waiting.replace(spec.aot_path)
        self.say(
            f"{spec.name}: {time.monotonic() - began:.0f} s, {spec.aot_path.stat().st_size / 2**20:.1f} MiB"
        )
        return True

    def _lean(self, spec: Any) -> str:
        if self.full:
            return "asked for"
        try:
            trimmed = lean(spec)
        except ValueError as error:
            return str(error)
        return self._ninja(trimmed) or unresolved(spec.jit_library_path)

    def _late(self) -> bool:
        return time.monotonic() >= self.deadline

    def _ninja(self, spec: Any) -> str:
        """ "" when it was built, else the compiler's own last words."""
        if self._late():
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
            said, _ = process.communicate(timeout=max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "no time left"
        if process.returncode == 0:
            return ""
        told = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines()
        return " | ".join(told[-4:])[-1500:]


def unresolved(library: Path) -> str:
    """ "" when a library has all its symbols, else what the loader misses: a stub that fits no entry would otherwise show at the first call."""
    try:
        ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        return str(error)
    return ""


def library_folder() -> Path:
    """Where FlashInfer looks for prebuilt modules."""
    from flashinfer.jit import env

    return Path(env.FLASHINFER_AOT_DIR)


def pack(folder: Path, out: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write every module of `folder` into tars of at most `part_bytes`, each module compressed by itself."""
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
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        written.append(path)
    return written


def unpack(source: Path, folder: Path) -> list[str]:
    """Put the modules of every pack in `source` under `folder`; those that are there stay as they are."""
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
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=["exam", "decoder"])
    parser.add_argument("--modules", type=int, default=8, help="modules that compile side by side")
    parser.add_argument(
        "--jobs", type=int, default=6, help="files of one module that compile side by side"
    )
    parser.add_argument(
        "--full", action="store_true", help="compile also the kernels that attnlib never calls"
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=480.0,
        help="no compiler runs longer; packing comes after",
    )
    parser.add_argument(
        "--arch", default="9.0a", help="FLASHINFER_CUDA_ARCH_LIST, where the environment has none"
    )
    parser.add_argument(
        "--unpack", type=Path, default=None, help="only unpack packs from this folder"
    )
    parser.add_argument("--list", action="store_true", help="only say which kernels the sets hold")
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
