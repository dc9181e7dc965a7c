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
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any

__all__ = ["import_error", "load", "load_ahead"]

_log = logging.getLogger("attnlib")
_LOCK = threading.Lock()
_LOADING: list[threading.Thread] = []
_KERNELS = {
    "prefill": "hopper_prefill_kernel",
    "decode": "hopper_decode_kernel",
    "combine": "hopper_combine_kernel",
}
"""Module -> kernel, of most layers."""


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


def load_ahead() -> None:
    """Begin to import the kernels and to read their sources, of 270 device functions: in a thread,
    once in a process. Who needs them before it ends waits for what is missing."""
    with _LOCK:
        if not _LOADING:
            _LOADING.append(threading.Thread(target=_read, daemon=True))
            _LOADING[0].start()


def _read() -> None:
    if load() is None:
        return
    from attnlib.ops.triton.launch.settle import compute_keys

    with suppress(Exception):  # a launch raises it again
        for module, name in _KERNELS.items():
            compute_keys(getattr(import_module(f"{__name__}.kernels.{module}"), name))


def import_error() -> str | None:
    """Why the Gluon kernels cannot be imported; None when they can."""
    return _load()[1]
