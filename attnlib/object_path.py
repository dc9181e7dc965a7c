"""Objects by path: `module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from attnlib.errors import ContractError

__all__ = ["is_absent", "load_object"]

_from_files: set[str] = set()
"""Names of the modules that were loaded from a file."""


def load_object(path: str) -> Any:
    """The object at a path; dots after the colon reach attributes.

    Raises:
        ContractError: the path has another form, or names no file or object.
        ModuleNotFoundError: there is no such module.
        Exception: whatever importing the module raises.
    """
    module, _, name = (part.strip() for part in path.rpartition(":"))
    if not _is_dotted(name) or not (module.endswith(".py") or _is_dotted(module)):
        raise ContractError(
            f"{path!r} is not a path to an object: write module:NAME or path/to/file.py:NAME"
        )
    loaded: Any = _module_from_file(module) if module.endswith(".py") else import_module(module)
    for part in name.split("."):
        if not hasattr(loaded, part):
            names = [one for one in dir(loaded) if not one.startswith("_")]
            nearest = difflib.get_close_matches(part, names, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ContractError(f"{module} has no {part!r} (from {path!r}){hint}")
        loaded = getattr(loaded, part)
    return loaded


def is_absent(path: str, error: BaseException) -> bool:
    """Whether `error` says that the module of a path does not exist, rather than one that it
    imports."""
    name = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    module = path.rpartition(":")[0].strip()
    return name is not None and f"{module}.".startswith(f"{name}.")


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _module_from_file(path: str) -> ModuleType:
    file = Path(path).resolve()
    name = file.stem
    if not file.is_file():
        state = "is not a file" if file.exists() else f"does not exist in {file.parent}"
        raise ContractError(f"{Path(path).name} {state}: give path/to/file.py:NAME")
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "?").resolve() == file:
        return known
    if known is not None and name not in _from_files:
        raise ContractError(
            f"{path} cannot be imported as {name!r}: a module of this name is already imported; "
            "rename the file"
        )
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file  # the name ends with .py
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # worker processes import the module by its name
    module = sys.modules[name] = module_from_spec(spec)
    _from_files.add(name)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
