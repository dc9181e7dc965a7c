"""Which Triton and Gluon kernels are new in this process: found on disk, or compiled."""

from __future__ import annotations

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


@contextmanager
def compiled_kernels() -> Iterator[list[CompiledKernel]]:
    """The kernels that are compiled inside, as a list that grows. A kernel from Triton's disk cache
    counts as well: every variant that is new in this process.

    It reads Triton's compilation listener. The hook `jit_post_compile_hook` would serialize the
    constants of a kernel, which fails for kernels with device functions among them.
    """
    import triton

    knobs = triton.knobs.compilation
    found: list[CompiledKernel] = []
    before = knobs.listener

    def note(*, src: Any, cache_hit: bool, **facts: Any) -> None:
        is_gluon = type(getattr(src, "fn", None)).__name__.startswith("Gluon")
        found.append(CompiledKernel(str(src.name), is_gluon, cache_hit))
        if before is not None:
            before(src=src, cache_hit=cache_hit, **facts)

    knobs.listener = note
    try:
        yield found
    finally:
        knobs.listener = before
