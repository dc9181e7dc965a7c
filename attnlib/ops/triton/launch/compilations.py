"""Which Triton and Gluon kernels are new in this process: found on disk, or compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["CompiledKernel", "compiled_kernels"]


class CompiledKernel(NamedTuple):
    """One kernel that is new in this process.

    Attributes:
        name: name of the kernel.
        is_gluon: whether it is a Gluon kernel.
        is_found: whether Triton found it in its cache on disk.
    """

    name: str
    is_gluon: bool
    is_found: bool = False


_LOCK = threading.Lock()
_OPEN: list[list[CompiledKernel]] = []
"""Lists that grow, also of several threads."""
_BEFORE: list[Any] = []
"""The listener that Triton had before these lists."""


@contextmanager
def compiled_kernels() -> Iterator[list[CompiledKernel]]:
    """The kernels that are compiled inside, as a list that grows. A kernel from Triton's disk cache
    counts as well: every variant that is new in this process, in any thread.

    It reads Triton's compilation listener. The hook `jit_post_compile_hook` would serialize the
    constants of a kernel, which fails for kernels with device functions among them.
    """
    found: list[CompiledKernel] = []
    with _LOCK:
        if not _OPEN:
            _listen()
        _OPEN.append(found)
    try:
        yield found
    finally:
        with _LOCK:
            _OPEN[:] = [one for one in _OPEN if one is not found]
            if not _OPEN:
                _knobs().listener = _BEFORE.pop()


def _listen() -> None:
    """Put one listener for all lists before that of others."""
    before = _knobs().listener

    def note(*, src: Any, cache_hit: bool, **facts: Any) -> None:
        is_gluon = type(getattr(src, "fn", None)).__name__.startswith("Gluon")
        for found in tuple(_OPEN):
            found.append(CompiledKernel(str(src.name), is_gluon, cache_hit))
        if before is not None:
            before(src=src, cache_hit=cache_hit, **facts)

    _BEFORE.append(before)
    _knobs().listener = note


def _knobs() -> Any:
    import triton

    return triton.knobs.compilation
