"""The door to the Gluon kernels: imported when a Hopper chip first asks, and never fatal.

Gluon lives under `triton.experimental`, whose names move between releases. Where the kernels cannot be imported, the
plain Triton kernels serve everything, and `hopper_missing` says why.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from typing import Any

__all__ = ["hopper_choice", "hopper_missing"]

_log = logging.getLogger("attnlib")


@functools.cache
def _load() -> tuple[Any, str | None]:
    try:
        return import_module("attnlib.ops.triton.hopper.dispatch"), None
    except (
        Exception
    ) as error:  # an experimental package may fail in any way, and plain Triton is always there
        return None, f"{type(error).__name__}: {error}"


def hopper_choice() -> Any:
    """The module `hopper.choice`, or None where it cannot be imported (said once in the log)."""
    module, reason = _load()
    if module is None:
        _warn(reason)
    return module


def hopper_missing() -> str | None:
    """Why the Gluon kernels cannot be imported; None when they can."""
    return _load()[1]


@functools.cache
def _warn(reason: str | None) -> None:
    _log.warning(
        "the Gluon kernels for Hopper cannot be imported (%s); plain Triton serves every call, more slowly",
        reason,
    )
