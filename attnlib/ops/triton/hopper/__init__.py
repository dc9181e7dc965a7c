"""Host side of the Gluon kernels for Hopper (SM90), used where plain Triton is slower.

    sizes         rows, heads and blocks that the kernels take
    support       which layers the kernels implement; also read by `explain`
    preference    from how many keys on the decodes are faster than the portable ones
    dispatch      what the rest of `ops.triton` uses: whether a kernel serves a call, and how
    decode_plan   constants and launches of the decode; decode_grid its workers and workspace
    prefill_plan  constants of the prefill; prefill_geometry its work tiles, prefill_kernels the
                  choice of its kernel, prefill_launches its arguments and descriptors
    converted_prefill  prefills over copies of quantized caches and of small blocks
    invariant_plan  both kernels of batch-invariant layers
    shared_decode_plan  constants and launches of decodes of shared prefixes
    latent_plan   constants and launches of decodes over latents; latent_tiles their tiles
    descriptors   TMA descriptors of caches and queries
    kernels/      device code

Gluon lives in `triton.experimental`, whose names change between releases. `load()` imports the
kernels on first use; where that fails, the plain Triton kernels serve every call, and
`import_error` returns the reason. There is no interpreter for Gluon: tests compile these kernels
without a GPU and run them on one.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from typing import Any

__all__ = ["import_error", "load"]

_log = logging.getLogger("attnlib")


@functools.cache
def _load() -> tuple[Any, str | None]:
    try:
        return import_module("attnlib.ops.triton.hopper.dispatch"), None
    except Exception as error:  # an experimental package may fail in any way
        reason = f"{type(error).__name__}: {error}"
        _log.warning(
            "the Gluon kernels for Hopper cannot be imported (%s); the plain Triton kernels serve "
            "every call at lower speed",
            reason,
        )
        return None, reason


def load() -> Any:
    """The module `hopper.dispatch`, or None where it cannot be imported (logged once)."""
    return _load()[0]


def import_error() -> str | None:
    """Why the Gluon kernels cannot be imported; None when they can."""
    return _load()[1]
