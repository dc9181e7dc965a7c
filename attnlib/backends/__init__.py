"""Attention backends.

Each package has three parts: the declaration (`__init__`: name, capabilities, availability), the
metadata builder (`metadata`) and the per-layer implementation (`impl`). A declaration can be
imported without the kernel package that it needs. `builtin.py` lists the built-in backends;
selection imports them by name.

The public classes are names of this package, imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "AttentionBackend": "attnlib.backends.base",
    "AttentionImpl": "attnlib.backends.base",
    "StateImpl": "attnlib.backends.state_impl",
    "StepPlan": "attnlib.backends.step_plan",
}
"""Name -> module that defines it."""

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from attnlib.backends.base import AttentionBackend as AttentionBackend
    from attnlib.backends.base import AttentionImpl as AttentionImpl
    from attnlib.backends.state_impl import StateImpl as StateImpl
    from attnlib.backends.step_plan import StepPlan as StepPlan


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(
            f"module 'attnlib.backends' has no attribute {name!r}; its names are "
            f"{', '.join(__all__)}"
        )
    value = getattr(import_module(module), name)
    globals()[name] = value  # later look-ups do not call this function
    return value


def __dir__() -> list[str]:
    return __all__
