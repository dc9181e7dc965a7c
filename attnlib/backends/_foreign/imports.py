"""Whether a third-party package can be imported, and which arguments its functions take.

An import can fail because the package is not installed, because its compiled module is missing,
because it was built for another torch ("undefined symbol"), or because it raises an error of its
own. Each case becomes a reason with a next action. What a function supports is read from its
signature, not from version numbers or module names.
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
    """The keyword arguments of a function.

    Attributes:
        names: those in its signature.
        open: whether it has `**kwargs`, so that other names may be valid too.
    """

    names: frozenset[str]
    open: bool = False

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def accepts(self, name: str) -> bool:
        """Whether `name` can be passed."""
        return self.open or name in self.names

    def first(self, *candidates: str) -> str | None:
        """The first of several alternative names that is in the signature, or None."""
        return next((name for name in candidates if name in self.names), None)


def keywords_of(function: Callable[..., Any]) -> Keywords:
    """The keyword arguments of `function`; none if its signature cannot be read (a builtin)."""
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
        problem: why the import failed; "" if the module is not installed.
    """

    module: ModuleType | None
    problem: str = ""


def is_installed(path: str) -> bool:
    """Whether the top-level package of `path` is installed; imports nothing."""
    package = path.partition(".")[0]
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def import_guarded(path: str) -> Import:
    """Import `path`; any exception becomes a message that quotes the original error."""
    if not is_installed(path):
        return Import(None)
    try:
        return Import(importlib.import_module(path))
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == path or path.startswith(missing + "."):
            return Import(None)  # the package is installed without this submodule: another edition
        return Import(
            None,
            f"{path} is incomplete: its module {missing} is missing ({_describe(error)}). It was "
            "installed without its compiled module or without a dependency: reinstall it with its "
            "binaries, or uninstall it",
        )
    except Exception as error:  # third-party code can raise anything at import
        return Import(None, f"{path} fails at import: {_describe(error)}. {_advice(str(error))}")


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def _advice(text: str) -> str:
    if "undefined symbol" in text or "GLIBCXX" in text or "cannot open shared object" in text:
        return (
            "It was built for another torch or CUDA: install a build for this one, or uninstall it"
        )
    return "Reinstall it to match this torch, or uninstall it"


def package_version(*distributions: str) -> str:
    """The version of the first installed distribution of these, or ""."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def environment_facts(device: DeviceInfo, distributions: Sequence[str]) -> str:
    """Versions that an ABI mismatch depends on: package, torch, C++ ABI, CUDA, device (I3)."""
    packages = ", ".join(
        f"{name} {version}" for name in distributions if (version := package_version(name))
    )
    torch_facts = (
        f"torch {torch.__version__}, cxx11 ABI {torch.compiled_with_cxx11_abi()}, "
        f"CUDA {torch.version.cuda}"
    )
    return f"[{'; '.join(filter(None, (packages, torch_facts, str(device))))}]"
