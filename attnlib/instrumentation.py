"""Observers of attention calls. Debugging tools (`attnlib.debug`) attach here; layers do not import
them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from attnlib import env

__all__ = [
    "ENVIRONMENT",
    "OBSERVERS",
    "STATE_OBSERVERS",
    "VALIDATE_KEY",
    "VALIDATORS",
    "Checker",
    "checker_for_level",
]

_VARIABLE = "ATTNLIB_VALIDATE"
_encode: Any = getattr(os.environ, "encodekey", None)

ENVIRONMENT: Mapping[Any, Any] = os.environ if _encode is None else vars(os.environ)["_data"]
"""The environment as stored: every layer call asks whether `VALIDATE_KEY` is in it, and
`os.environ` takes 20 times as long to answer."""
VALIDATE_KEY: Any = _VARIABLE if _encode is None else _encode(_VARIABLE)

OBSERVERS: list[Callable[..., None]] = []
"""Called after every layer call with (layer, query, key, value, cache, metadata, output, lse)."""


STATE_OBSERVERS: list[Callable[..., Callable[[], None] | None]] = []
"""Called before every call of a state layer, which overwrites its states, with (layer, "recurrence"
or "convolution", tensors of the call, cache, metadata, output); each returns what to call after the
launches, or None."""


Checker = Callable[..., Callable[[], None] | None]
"""A check before a layer call; returns what to call after the launches, or None."""


VALIDATORS: dict[int, Callable[[], Checker]] = {}
"""What returns the check of each level of ATTNLIB_VALIDATE. The package `attnlib` fills it in:
checks import layers, which import this module."""


def checker_for_level() -> Checker | None:
    """The check of tensor values that ATTNLIB_VALIDATE turns on, called before each layer call with
    (layer, query, key, value, cache, metadata); None when the variable is unset or 0. Level 2 also
    starts shadow execution."""
    level = env.read(_VARIABLE)
    return VALIDATORS[level]() if level else None
