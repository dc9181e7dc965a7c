"""Objects by path: `module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from attnlib.errors import ContractError

__all__ = ["load_object"]


def load_object(path: str) -> Any:
    """The object at a path; dots after the colon reach attributes.

    Raises:
        ContractError: the path names no Python file.
        ImportError, AttributeError: the module or the object does not exist.
    """
    module, _, name = path.rpartition(":")
    loaded: Any = _module_from_file(module) if module.endswith(".py") else import_module(module)
    for part in name.split("."):
        loaded = getattr(loaded, part)
    return loaded


def _module_from_file(path: str) -> ModuleType:
    spec = spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).exists():
        raise ContractError(f"{path} is not a Python file: give path/to/file.py:NAME")
    known = sys.modules.get(spec.name)
    if known is not None and getattr(known, "__file__", None) == spec.origin:
        return known
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # worker processes import the module by its name
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
