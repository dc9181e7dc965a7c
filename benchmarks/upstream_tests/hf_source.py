"""transformers' common tests as a package, read from a copy of its source distribution."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["SOURCE", "common_tests"]

SOURCE = "ATTNLIB_HF_TESTS"
"""Environment variable: the folder `tests` of a source distribution of transformers."""
_PACKAGE = "hf_tests"
_ABSENT = {
    "exporters.test_export": "ExportTesterMixin",
    "generation.test_utils": "GenerationTesterMixin",
}
"""Modules that the source distribution lacks, and the class that the common tests import."""
_SHARE = "if np.mean(results) < 0.8:"


def common_tests() -> Any:
    """The module `test_modeling_common`, in which every row of a batch must be right: upstream
    accepts 80% of them."""
    name = f"{_PACKAGE}.test_modeling_common"
    if name in sys.modules:
        return sys.modules[name]
    folder = Path(os.environ[SOURCE])
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[_PACKAGE] = package
    for name_in_package, attribute in _ABSENT.items():
        module = ModuleType(f"{_PACKAGE}.{name_in_package}")
        setattr(module, attribute, type(attribute, (), {}))
        parent = ModuleType(f"{_PACKAGE}.{name_in_package.partition('.')[0]}")
        parent.__path__ = []
        sys.modules[parent.__name__] = parent
        sys.modules[module.__name__] = module
    path = folder / "test_modeling_common.py"
    source = path.read_text()
    if source.count(_SHARE) != 1:
        raise SystemExit(f"{path}: `{_SHARE}` is not there once; adapt hf_source.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(
        compile(source.replace(_SHARE, _SHARE.replace("0.8", "1.0")), str(path), "exec"),
        vars(module),
    )
    return module
