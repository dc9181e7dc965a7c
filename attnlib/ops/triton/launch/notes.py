"""Notes about warm-ups in Triton's cache: which of their steps were the first to need a kernel.

They only save time: a warm-up without a note runs all its steps. A folder of compiled kernels is a
cache, too (`kernel_folder`), and has the notes of the warm-ups that found the kernels.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.cache import get_cache_manager

__all__ = ["NOTE", "read_note", "write_note"]

NOTE = "attnlib_warmup.json"
_ROOT = Path(__file__).parents[3]
_PREFIXES = ("ATTNLIB_", "TRITON_")
_WITHOUT_KERNELS = {"bench", "cli", "compat", "debug", "integrations", "testing"}
_CHOOSE_NOTHING = {
    *("ATTNLIB_KERNELS", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_STORE_BINARY_ONLY"),
    *("TRITON_CACHE_AUTOTUNING", "TRITON_LIBCUDA_PATH", "TRITON_LIBDEVICE_PATH"),
    "TRITON_PTXAS_PATH",
}
"""Variables about places, stored files and Triton's autotuner, some of which vLLM and torch set."""


def read_note(facts: str, num_steps: int) -> list[int] | None:
    """The noted steps of a warm-up; None without a note.

    Args:
        facts: what decides the kernels of its steps besides the code and the environment.
        num_steps: how many steps it has.
    """
    try:
        path = _manager(facts).get_file(NOTE)
        found = [] if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    valid = isinstance(found, list) and all(type(x) is int and 0 <= x < num_steps for x in found)
    return found or None if valid else None


def write_note(facts: str, steps: Sequence[int]) -> None:
    """Note steps for later processes, where Triton's cache can be written."""
    try:
        _manager(facts).put(json.dumps(list(steps)), NOTE, binary=False)
    except OSError:
        return


def _manager(facts: str) -> Any:
    # Builds of one release of torch for other processors and CUDA versions choose no other kernels.
    release = torch.__version__.partition("+")[0]
    text = "\0".join((facts, triton.__version__, release, _digest_of_code(), _variables()))
    return get_cache_manager(hashlib.sha256(text.encode()).hexdigest())


def _variables() -> str:
    """The environment variables that may decide which kernels are chosen."""
    names = (
        name for name in os.environ if name.startswith(_PREFIXES) and name not in _CHOOSE_NOTHING
    )
    return repr([(name, os.environ[name]) for name in sorted(names)])


@functools.cache
def _digest_of_code() -> str:
    """Of all files of the package that decide kernels: code, tables and sources in C."""
    digest = hashlib.sha256()
    for folder in sorted(path for path in _ROOT.iterdir() if path.name not in _WITHOUT_KERNELS):
        for file in sorted(folder.rglob("*")) if folder.is_dir() else (folder,):
            if file.suffix in (".py", ".json", ".c"):
                digest.update(file.relative_to(_ROOT).as_posix().encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()
