"""The functions of flash-linear-attention that the backend calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from attnlib.backends._foreign.imports import import_guarded, keywords_of

__all__ = ["MODULES", "find_functions"]

MODULES = ("gated_delta_rule", "kda", "simple_gla", "gla")
"""Modules of `fla.ops`; each has `chunk_NAME` and `fused_recurrent_NAME`."""


@lru_cache(maxsize=1)
def find_functions() -> tuple[Mapping[str, Callable[..., Any]], str]:
    """The functions by name, or why they cannot be used.

    States must be `[Dv, Dk]` (T20), which earlier releases cannot be told by this name.
    """
    found: dict[str, Callable[..., Any]] = {}
    for module in MODULES:
        imported = import_guarded(f"fla.ops.{module}")
        if imported.module is None:
            return {}, imported.problem or f"fla has no fla.ops.{module}: pip install -U fla-core"
        for name in (f"chunk_{module}", f"fused_recurrent_{module}"):
            function = getattr(imported.module, name, None)
            if function is None or "state_v_first" not in keywords_of(function):
                return {}, f"fla's {name} has no state_v_first: pip install -U fla-core (0.6)"
            found[name] = function
    return found, ""
