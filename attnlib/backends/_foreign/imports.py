"""Finding out whether somebody else's package is there and what its functions take. Shared by the adapters of foreign kernels.

A package is available when its compiled symbol imports, and importing may fail in every way: missing, hollow (the Python files without the
compiled module), built for another torch ("undefined symbol"), or refusing with a RuntimeError. Each of these is a reason with a next action,
never a crash. What a function can do is read from its signature, never from a version number or the name of its module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from attnlib.device import DeviceInfo

__all__ = [
    "Import",
    "Keywords",
    "environment_facts",
    "import_guarded",
    "is_installed",
    "keywords_of",
    "package_version",
]


@dataclass(frozen=True)
class Keywords:
    """The names that a function takes by keyword.

    Attributes:
        names: those in its signature.
        open: it also takes any other (`**kwargs`), so absence proves nothing.
    """

    names: frozenset[str]
    open: bool = False

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def takes(self, name: str) -> bool:
        """Whether `name` may be passed."""
        return self.open or name in self.names

    def first(self, *candidates: str) -> str | None:
        """The first of several names for one thing that the function takes; None when it takes none of them."""
        return next((name for name in candidates if name in self.names), None)


def keywords_of(function: Callable[..., Any]) -> Keywords:
    """What `function` takes by keyword; nothing when its signature cannot be read (a builtin)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return Keywords(frozenset())
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = frozenset(parameter.name for parameter in parameters if parameter.kind in by_keyword)
    return Keywords(
        names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    )


@dataclass(frozen=True)
class Import:
    """The result of an import that may fail.

    Attributes:
        module: the module, or None.
        problem: why there is none; "" when it is simply not installed.
    """

    module: ModuleType | None
    problem: str = ""


def is_installed(path: str) -> bool:
    """Whether the top-level package of `path` can be found; nothing is imported."""
    package = path.partition(".")[0]
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def import_guarded(path: str) -> Import:
    """Import `path`; every exception becomes a sentence that carries the original error."""
    if not is_installed(path):
        return Import(None)
    try:
        return Import(importlib.import_module(path))
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == path or path.startswith(missing + "."):
            return Import(None)  # the package is there, this part of it is not: another edition
        return Import(
            None,
            f"{path} is hollow: its module {missing} is missing ({_said(error)}). It was installed without its compiled part, or without a package "
            f"that it needs: reinstall it with its binaries, or uninstall it",
        )
    except Exception as error:  # any package may raise anything at import
        return Import(None, f"{path} fails at import: {_said(error)}. {_advice(str(error))}")


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def _advice(text: str) -> str:
    if "undefined symbol" in text or "GLIBCXX" in text or "cannot open shared object" in text:
        return "It was built for another torch or CUDA: install a build made for this one, or uninstall it"
    return "Reinstall it to match this torch, or uninstall it"


def package_version(*distributions: str) -> str:
    """The version of the first of these distributions that is installed; "" when none is."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def environment_facts(device: DeviceInfo, distributions: Sequence[str]) -> str:
    """What an ABI clash depends on, in one line: package, torch, its C++ ABI and CUDA, and the device (I3)."""
    packages = (
        ", ".join(
            f"{name} {version}" for name in distributions if (version := package_version(name))
        )
        or "package version unknown"
    )
    abi = torch.compiled_with_cxx11_abi()
    return f"[{packages}; torch {torch.__version__}, cxx11 ABI {abi}, CUDA {torch.version.cuda}; {device}]"
