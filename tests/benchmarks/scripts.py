"""The scripts of benchmarks/gpu as modules; the folder is not a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


def load(name: str) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses need their module
    spec.loader.exec_module(module)
    return module
