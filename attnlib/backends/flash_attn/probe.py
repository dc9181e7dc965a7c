"""Find installed FlashAttention kernels and identify their generation.

Five projects ship the same kernels under different names, and one name (`flash_attn`) is used by
two generations. Every known module is therefore imported, and its functions are identified by their
signatures and build flags, not by the name of the module:

    a varlen function with `fa_version`          several generations; flags of the module say which
    were built a varlen function with `page_table`          FlashAttention 4
    a varlen function with `block_table`         FlashAttention 2
    a kvcache function with `page_table` and `cu_seqlens_q`   FlashAttention 3
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from attnlib.backends._foreign.imports import (
    Import,
    Keywords,
    import_guarded,
    is_installed,
    keywords_of,
    package_version,
)
from attnlib.backends.flash_attn.kernel import FlashKernel
from attnlib.device import resolve_device

__all__ = ["SOURCES", "FoundKernels", "find_kernels", "nothing_installed"]

SOURCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("flash_attn", ("flash-attn", "flash_attn")),
    ("flash_attn_3.flash_attn_interface", ("flash-attn-3", "flash_attn_3")),
    ("flash_attn_interface", ("flash-attn-3", "flash_attn_3")),
    ("vllm.vllm_flash_attn", ("vllm",)),
    ("sgl_kernel.flash_attn", ("sgl-kernel", "sgl_kernel")),
    ("flash_attn.cute", ("flash-attn-4", "fa4")),
)
"""(module, distributions that contain it), in order of preference among equal generations."""


_FA4_NEEDS = "cutlass"


@dataclass(frozen=True)
class FoundKernels:
    """The result of `find_kernels`.

    Attributes:
        kernels: usable kernels, in the order of `SOURCES`.
        problems: why installed packages cannot be used, each with the next action.
    """

    kernels: tuple[FlashKernel, ...]
    problems: tuple[str, ...]


def nothing_installed() -> bool:
    """Whether none of the known packages is installed; imports nothing."""
    return not any(is_installed(path) for path, _ in SOURCES)


@lru_cache(maxsize=1)
def find_kernels() -> FoundKernels:
    """Import every known module and identify its kernels, without initializing CUDA."""
    kernels: list[FlashKernel] = []
    problems: list[str] = []
    broken: list[str] = []
    for path, distributions in SOURCES:
        if any(path.startswith(f"{parent}.") for parent in broken):
            continue  # it would fail again with the same message
        with _quack_arch():
            imported: Import = import_guarded(path)
        if imported.problem:
            broken.append(path)
            problems.append(imported.problem)
        if imported.module is not None:
            found, reasons = _identify(path, package_version(*distributions), imported.module)
            kernels += found
            problems += reasons
    return FoundKernels(tuple(kernels), tuple(problems))


@contextmanager
def _quack_arch() -> Iterator[None]:
    """Set QUACK_ARCH during an import.

    FlashAttention 4 imports quack, which initializes CUDA at import to query the compute capability
    unless QUACK_ARCH gives it (H2).
    """
    capability = resolve_device(None).capability
    if capability is None or os.environ.get("QUACK_ARCH"):
        yield
        return
    os.environ["QUACK_ARCH"] = "{}{}".format(*capability)
    try:
        yield
    finally:
        os.environ.pop("QUACK_ARCH", None)


def _identify(path: str, release: str, module: ModuleType) -> tuple[list[FlashKernel], list[str]]:
    varlen = getattr(module, "flash_attn_varlen_func", None)
    kvcache = getattr(module, "flash_attn_with_kvcache", None)
    if varlen is None and kvcache is None:
        if getattr(module, "__file__", None) is None:
            return [], []  # a namespace package created by another package's submodule
        return [], [
            f"{path} has neither flash_attn_varlen_func nor flash_attn_with_kvcache, so its build "
            "is incomplete: reinstall it with its binaries"
        ]
    if kvcache is not None:
        names = keywords_of(kvcache)
        if all(name in names for name in ("page_table", "cu_seqlens_q", "cache_seqlens")):
            return _fa3_kernel(path, release, module, kvcache, names)
    if varlen is not None:
        names = keywords_of(varlen)
        if "fa_version" in names:
            return _multi_version_kernels(path, release, module, varlen, names)
        if "page_table" in names and "seqused_k" in names:
            return [_fa4_kernel(path, release, module, varlen, names)], []
        if "block_table" in names:
            return [FlashKernel(2, path, release, varlen, names, block_multiple=256)], []
    name = f"{path} {release}".strip()
    return [], [
        f"{name} does not support a paged cache (no block_table or page_table argument): "
        "install flash-attn 2.6 or later"
    ]


def _fa3_kernel(
    path: str, release: str, module: ModuleType, function: Callable[..., Any], names: Keywords
) -> tuple[list[FlashKernel], list[str]]:
    flags = _build_flags(path, module)
    for flag in ("FLASHATTENTION_DISABLE_PAGEDKV", "FLASHATTENTION_DISABLE_VARLEN"):
        if flag in flags:
            return [], [f"{path} was built with {flag}: rebuild it without that flag"]
    select = {"ver": 3} if "ver" in names else {}
    scheduler = getattr(module, "get_scheduler_metadata", None)
    return [FlashKernel(3, path, release, function, names, select, scheduler, flags)], []


def _fa4_kernel(
    path: str, release: str, module: ModuleType, function: Callable[..., Any], names: Keywords
) -> FlashKernel:
    return FlashKernel(
        4,
        path,
        release,
        function,
        names,
        unbounded=None,
        separate_256=_has_separate_256(Path(getattr(module, "__file__", None) or "").parent),
    )


def _has_separate_256(folder: Path) -> bool:
    """Whether a folder of FlashAttention 4 has the forward kernel for head size 256 alone."""
    return (folder / "sm100_hd256_2cta_fmha_forward.py").is_file()


def _multi_version_kernels(
    path: str, release: str, module: ModuleType, function: Callable[..., Any], names: Keywords
) -> tuple[list[FlashKernel], list[str]]:
    defining = inspect.getmodule(function) or module
    folder = Path(getattr(module, "__file__", None) or "").parent

    def flag(name: str, default: Any) -> Any:
        return getattr(defining, name, getattr(module, name, default))

    kernels, problems = [], []
    for version in (3, 4, 2):
        if not flag(f"FA{version}_AVAILABLE", False):
            reason = flag(f"FA{version}_UNAVAILABLE_REASON", None)
            problems.append(
                f"{path} was built without FlashAttention {version}"
                f"{f' ({reason})' if reason else ''}: install a build that has it"
            )
            continue
        if version == 4 and not is_installed(_FA4_NEEDS):
            # The build calls it available if its files are there, and imports this when it is used.
            problems.append(
                f"{path}: FlashAttention 4 needs {_FA4_NEEDS}: pip install nvidia-cutlass-dsl"
            )
            continue
        scheduler = getattr(module, "get_scheduler_metadata", None) if version == 3 else None
        multiple = 16 if version == 2 else 1
        kernels.append(
            FlashKernel(
                version,
                path,
                release,
                function,
                names,
                {"fa_version": version},
                scheduler,
                block_multiple=multiple,
                splits_on_hopper=version == 4,
                separate_256=version == 4 and _has_separate_256(folder / "cute"),
            )
        )
    return kernels, problems


def _build_flags(path: str, module: ModuleType) -> frozenset[str]:
    """The build flags that are set, from the package's config; empty if it has none."""
    config = getattr(module, "CONFIG", None)
    if config is None:
        parent = path.rpartition(".")[0]
        record = import_guarded(
            f"{parent}.flash_attn_config" if parent else "flash_attn_config"
        ).module
        config = getattr(record, "CONFIG", None)
    flags = config.get("build_flags", {}) if isinstance(config, dict) else {}
    return frozenset(name for name, value in flags.items() if value)
