"""A folder of compiled kernels that another machine uses: a cache of Triton, and a manifest.

Triton notes the files of a kernel by their absolute paths, so a folder that was copied elsewhere
is not a cache any more. `use_kernel_folder` therefore records in Triton's cache where the files are
now. It copies nothing but modules in C and notes about warm-ups.
"""

from __future__ import annotations

import base64
import functools
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import FileCacheManager, get_cache_manager

from attnlib import env
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.launch.described import NeededKernel
from attnlib.ops.triton.launch.driver import Native
from attnlib.ops.triton.launch.keys import folder_name
from attnlib.ops.triton.launch.manifest import Manifest
from attnlib.ops.triton.launch.notes import NOTE

__all__ = [
    "add_to_cache",
    "cache_at",
    "cache_folder",
    "is_stored",
    "use_kernel_folder",
    "write_launcher",
]

_log = logging.getLogger("attnlib")


def is_stored(kernel: NeededKernel, folder: Path | None = None) -> bool:
    """Whether a kernel is in a folder of kernels; None for Triton's cache."""
    if folder is not None:
        return bool(_files(kernel, folder))
    noted = _noted(kernel, cache_folder())
    return bool(noted) and all(Path(path).exists() for path in noted.values())


def cache_folder() -> Path:
    """The folder of Triton's cache."""
    return Path(triton.knobs.cache.dir)


@contextmanager
def cache_at(folder: Path | None) -> Iterator[None]:
    """Inside, Triton's cache is `folder`, and only binaries are stored; None changes nothing."""
    if folder is None:
        yield
        return
    cache, compilation = triton.knobs.cache, triton.knobs.compilation
    with cache.scope(), compilation.scope():
        cache.dir = str(folder.absolute())
        compilation.store_binary_only = True
        yield


def write_launcher() -> None:
    """Compile attnlib's launcher into Triton's cache, if there is a C compiler."""
    try:
        Native()
    except Exception as error:  # a compiler may fail in any way; the server compiles it then
        _log.warning("attnlib's launcher in C could not be compiled: %s", error)


@functools.cache
def use_kernel_folder() -> None:
    """Let Triton find the kernels of ATTNLIB_KERNELS, once in a process.

    Logs a warning where keys differ, and where Triton's cache is not a folder.

    Raises:
        ContractError: the folder has no manifest.
    """
    if chips.INTERPRETED or not (name := env.read("ATTNLIB_KERNELS")):
        return
    folder = Path(name).expanduser().absolute()
    manifest = Manifest.read(folder)
    if triton.knobs.cache.manager_class not in (None, FileCacheManager):
        _log.warning("ATTNLIB_KERNELS=%s is not used: TRITON_CACHE_MANAGER is set", folder)
        return
    target: Any = triton.runtime.driver.active.get_current_target()
    if differences := manifest.differences(target):
        _log.warning(
            "ATTNLIB_KERNELS=%s was made for another environment (%s): kernels with other keys are "
            "compiled here; run attnlib compile in this one",
            folder,
            "; ".join(differences),
        )
    try:
        kernels = {one: None for entry in manifest.entries_for(target) for one in entry.needed()}
        added, missing = add_to_cache(folder, kernels)
    except OSError as error:
        _log.warning("the kernels of ATTNLIB_KERNELS=%s are not used: %s", folder, error)
        return
    if missing:
        _log.warning("%d kernels of %s have no files", missing, folder)
    _log.info("%d kernels of %s added to Triton's cache", added, folder)


def add_to_cache(folder: Path, kernels: Iterable[NeededKernel]) -> tuple[int, int]:
    """Note in Triton's cache where the files of kernels are; copy modules in C and notes.

    Returns:
        Kernels that the cache did not have, and kernels that the folder does not have.

    Raises:
        OSError: Triton's cache cannot be written.
    """
    added = missing = 0
    for kernel in kernels:
        if is_stored(kernel):
            continue
        files = _files(kernel, folder)
        manager: Any = get_cache_manager(kernel.key)
        if files:
            manager.put_group(_metadata_name(kernel.name), files)
        added, missing = added + bool(files), missing + (not files)
    for file in (*folder.glob("*/*.so"), *folder.glob(f"*/{NOTE}")):
        manager = get_cache_manager(_key(file.parent.name))
        if manager.get_file(file.name) is None:
            manager.put(file.read_bytes(), file.name)
    return added, missing


def _files(kernel: NeededKernel, folder: Path) -> dict[str, str]:
    """Name -> path of the files of a kernel, wherever the folder was when they were written; empty
    if one is missing."""
    own = folder / folder_name(kernel.key)
    files = {name: own / name for name in _noted(kernel, folder)}
    complete = all(path.exists() for path in files.values())
    return {name: str(path) for name, path in files.items()} if complete else {}


def _noted(kernel: NeededKernel, folder: Path) -> dict[str, str]:
    """Name -> path of the files of a kernel as Triton noted them; empty if it did not."""
    file = folder / folder_name(kernel.key) / f"__grp__{_metadata_name(kernel.name)}"
    try:
        paths: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))["child_paths"]
    except (OSError, ValueError, KeyError):
        return {}
    return paths


def _metadata_name(kernel: str) -> str:
    """The file of a kernel that Triton finds the others by."""
    return f"{kernel[:150]}.json"


def _key(folder: str) -> str:
    """The key of a folder in Triton's cache."""
    return base64.b32decode(folder + "=" * (-len(folder) % 8)).hex()
