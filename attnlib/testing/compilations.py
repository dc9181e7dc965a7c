"""Which Triton and Gluon kernels are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["CompiledKernel", "compiled_kernels"]


class CompiledKernel(NamedTuple):
    """One compilation.

    Attributes:
        name: name of the kernel.
        is_gluon: whether it is a Gluon kernel.
    """

    name: str
    is_gluon: bool


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

    def note(*, src: Any, **facts: Any) -> None:
        is_gluon = type(getattr(src, "fn", None)).__name__.startswith("Gluon")
        found.append(CompiledKernel(str(src.name), is_gluon))
        if before is not None:
            before(src=src, **facts)

    knobs.listener = note
    try:
        yield found
    finally:
        knobs.listener = before
