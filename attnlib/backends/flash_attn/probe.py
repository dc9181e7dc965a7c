"""Which FlashAttention is installed, found out by its functions, their signatures and its build flags, never by a module's name.

Five projects ship the same kernels under different names, and one name (`flash_attn`) holds two generations. So every known place is imported
under guard, and what is found there is told apart by what it takes:

    a varlen function with `fa_version`          several generations behind one function; its flags say which were built
    a varlen function with `page_table`          FlashAttention 4
    a varlen function with `block_table`         FlashAttention 2
    a kvcache function with `page_table` and `cu_seqlens_q`   FlashAttention 3
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
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
from attnlib.device import resolve_device

__all__ = ["SOURCES", "FlashKernel", "Found", "find_kernels", "nothing_installed"]

SOURCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("flash_attn", ("flash-attn", "flash_attn")),
    ("flash_attn_3.flash_attn_interface", ("flash-attn-3", "flash_attn_3")),
    ("flash_attn_interface", ("flash-attn-3", "flash_attn_3")),
    ("vllm.vllm_flash_attn", ("vllm",)),
    ("sgl_kernel.flash_attn", ("sgl-kernel", "sgl_kernel")),
    ("flash_attn.cute", ("flash-attn-4", "fa4")),
)
"""Where FlashAttention may be: (module, distributions that bring it), in order of preference among equals."""


@dataclass(frozen=True)
class FlashKernel:
    """One generation of FlashAttention that can read a paged cache, and how to call it.

    Attributes:
        version: 2, 3 or 4.
        source: the module it was found in.
        release: the distribution's version, "" when unknown.
        function: the attention function; called by keyword only.
        keywords: what it takes.
        select: fixed arguments that choose this generation, such as `fa_version=3`.
        scheduler: the ahead-of-time scheduler, or None.
        flags: build flags that are known and set ("FLASHATTENTION_DISABLE_...").
        block_multiple: block sizes must be a multiple of this.
    """

    version: int
    source: str
    release: str
    function: Callable[..., Any]
    keywords: Keywords
    select: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Callable[..., Any] | None = None
    flags: frozenset[str] = frozenset()
    block_multiple: int = 1

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"FlashAttention {self.version} ({self.source}{' ' + self.release if self.release else ''})"

    @property
    def takes_key_bound(self) -> bool:
        """Whether the caller gives the longest sequence; otherwise the kernel takes the width of the table for it."""
        return "max_seqlen_k" in self.keywords

    @property
    def takes_lengths(self) -> bool:
        """Whether it takes lengths of sequences; otherwise their running sum."""
        return self.keywords.first("seqused_k", "cache_seqlens") is not None


@dataclass(frozen=True)
class Found:
    """Everything that was found.

    Attributes:
        kernels: usable ones, in the order of `SOURCES`.
        gaps: what is there and cannot be used, each with the next action.
    """

    kernels: tuple[FlashKernel, ...]
    gaps: tuple[str, ...]


def nothing_installed() -> bool:
    """True when no known package is installed at all; nothing is imported."""
    return not any(is_installed(path) for path, _ in SOURCES)


@lru_cache(maxsize=1)
def find_kernels() -> Found:
    """Import every known place under guard and recognise what is there. No CUDA start-up of our own, no network."""
    kernels: list[FlashKernel] = []
    gaps: list[str] = []
    broken: list[str] = []
    for path, distributions in SOURCES:
        if any(path.startswith(f"{parent}.") for parent in broken):
            continue  # it would only fail again, with the same words
        with _chip_told_to_quack():
            imported: Import = import_guarded(path)
        if imported.problem:
            broken.append(path)
            gaps.append(imported.problem)
        if imported.module is not None:
            found, missing = _recognise(path, package_version(*distributions), imported.module)
            kernels += found
            gaps += missing
    return Found(tuple(kernels), tuple(gaps))


@contextmanager
def _chip_told_to_quack() -> Iterator[None]:
    """quack, which FlashAttention 4 imports, asks CUDA for the chip at import, and so starts it, unless QUACK_ARCH says which one it is (H2)."""
    capability = resolve_device(None).capability
    if capability is None or os.environ.get("QUACK_ARCH"):
        yield
        return
    os.environ["QUACK_ARCH"] = "{}{}".format(*capability)
    try:
        yield
    finally:
        os.environ.pop("QUACK_ARCH", None)


def _recognise(path: str, release: str, module: ModuleType) -> tuple[list[FlashKernel], list[str]]:
    varlen = getattr(module, "flash_attn_varlen_func", None)
    kvcache = getattr(module, "flash_attn_with_kvcache", None)
    if varlen is None and kvcache is None:
        if getattr(module, "__file__", None) is None:
            return [], []  # a namespace that another package's submodule brought into being
        return [], [
            f"{path} has neither flash_attn_varlen_func nor flash_attn_with_kvcache: a hollow build; reinstall it with its binaries"
        ]
    if kvcache is not None:
        names = keywords_of(kvcache)
        if all(name in names for name in ("page_table", "cu_seqlens_q", "cache_seqlens")):
            return _third(path, release, module, kvcache, names)
    if varlen is not None:
        names = keywords_of(varlen)
        if "fa_version" in names:
            return _several(path, release, module, varlen, names)
        if "page_table" in names and "seqused_k" in names:
            return [FlashKernel(4, path, release, varlen, names)], []
        if "block_table" in names:
            return [FlashKernel(2, path, release, varlen, names, block_multiple=256)], []
    name = f"{path} {release}".strip()
    return [], [
        f"{name} reads no paged cache (no block_table or page_table argument): install flash-attn 2.6 or later"
    ]


def _third(
    path: str, release: str, module: ModuleType, function: Callable[..., Any], names: Keywords
) -> tuple[list[FlashKernel], list[str]]:
    flags = _build_flags(path, module)
    if "FLASHATTENTION_DISABLE_PAGEDKV" in flags or "FLASHATTENTION_DISABLE_VARLEN" in flags:
        gone = (
            "FLASHATTENTION_DISABLE_PAGEDKV"
            if "FLASHATTENTION_DISABLE_PAGEDKV" in flags
            else "FLASHATTENTION_DISABLE_VARLEN"
        )
        return [], [f"{path} was built with {gone}: rebuild it without that flag"]
    select = {"ver": 3} if "ver" in names else {}
    scheduler = getattr(module, "get_scheduler_metadata", None)
    return [FlashKernel(3, path, release, function, names, select, scheduler, flags)], []


def _several(
    path: str, release: str, module: ModuleType, function: Callable[..., Any], names: Keywords
) -> tuple[list[FlashKernel], list[str]]:
    home = inspect.getmodule(function) or module
    kernels, gaps = [], []
    for version in (3, 4, 2):
        if not getattr(
            home, f"FA{version}_AVAILABLE", getattr(module, f"FA{version}_AVAILABLE", False)
        ):
            reason = getattr(
                home,
                f"FA{version}_UNAVAILABLE_REASON",
                getattr(module, f"FA{version}_UNAVAILABLE_REASON", None),
            )
            gaps.append(
                f"{path} was built without FlashAttention {version}{f' ({reason})' if reason else ''}: install a build that has it"
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
            )
        )
    return kernels, gaps


def _build_flags(path: str, module: ModuleType) -> frozenset[str]:
    """Build flags that are set, from the build's own record of them; empty when it keeps none."""
    config = getattr(module, "CONFIG", None)
    if config is None:
        parent = path.rpartition(".")[0]
        record = import_guarded(
            f"{parent}.flash_attn_config" if parent else "flash_attn_config"
        ).module
        config = getattr(record, "CONFIG", None)
    flags = config.get("build_flags", {}) if isinstance(config, dict) else {}
    return frozenset(name for name, value in flags.items() if value)
