"""Python runs this file at the start of each process below `attnlib run`.

It imports no package. When the process has imported `transformers.modeling_utils`, the first model
that it makes registers attnlib. Not earlier: an import that is still going on may hold modules of
transformers that `register` needs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from typing import Any

_NAME = "transformers.modeling_utils"


class _Finder:
    """Finds `transformers.modeling_utils` as the other finders do, and prepares it once loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                _register_with_the_first_model(module.PreTrainedModel)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of one module
        return spec


def _register_with_the_first_model(model_class: Any) -> None:
    original = model_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            module = importlib.import_module("attnlib.integrations.transformers.by_default")
        except ImportError as error:
            raise ImportError(
                f"attnlib run: {sys.executable} cannot import attnlib ({error}); install it there, "
                "or run the program without `attnlib run`"
            ) from error
        module.use_by_default()
        model_class.__init__ = original
        original(self, *args, **kwargs)

    model_class.__init__ = __init__


def _run_the_hidden_one() -> None:
    """Run the `sitecustomize` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [one for one in sys.path if os.path.abspath(one) != here]
    own = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


sys.meta_path.insert(0, _Finder())
_run_the_hidden_one()
