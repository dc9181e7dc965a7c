"""Observers of attention calls. Debugging tools (`attnlib.debug`) attach here; layers do not import
them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from attnlib import env

__all__ = ["OBSERVERS", "VALIDATE_VARIABLE", "Checker", "checker_for_level"]

VALIDATE_VARIABLE = "ATTNLIB_VALIDATE"

OBSERVERS: list[Callable[..., None]] = []
"""Called after every layer call with (layer, query, key, value, cache, metadata, output, lse)."""


Checker = Callable[..., Callable[[], None] | None]
"""A check before a layer call; returns what to call after the launches, or None."""


def checker_for_level() -> Checker | None:
    """The check of tensor values that ATTNLIB_VALIDATE turns on, called before each layer call with
    (layer, query, key, value, cache, metadata); None when the variable is unset or 0. Level 2 also
    starts shadow execution."""
    level = env.read(VALIDATE_VARIABLE)
    if not level:
        return None
    if level == 2:
        import_module("attnlib.debug.shadow").enable_validation_shadow()
    checker: Checker = import_module("attnlib.debug.validation").check_call_values
    return checker
