"""What Gluon calls things, release by release.

Names under `triton.experimental` move between minors. This module is the one place that knows: kernels import the
concept from here. Seen: Triton 3.6.0 and 3.9.0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor", "await_predecessor", "consumers_sync", "exp2", "load_box", "partition_barrier",
    "prefetch_line", "release_successor",
]  # fmt: skip

partition_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Synchronises the threads of the partition that calls it (`thread_barrier` up to 3.6)."""

load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""TMA copy of a box into shared memory, completing on an mbarrier (`async_copy_global_to_shared` up to 3.7)."""


@gluon.jit
def consumers_sync(CONSUMERS: gl.constexpr):
    """Wait until all two or three multiplying warpgroups have come here. Named barrier 11 is free of Triton's own (9 to 14 are)."""
    if CONSUMERS == 3:
        gl.inline_asm_elementwise(
            "bar.sync 11, 384; mov.b32 $0, $1;", "=r,r", [0], gl.int32, False, 1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.sync 11, 256; mov.b32 $0, $1;", "=r,r", [0], gl.int32, False, 1
        )


@gluon.jit
def exp2(x):
    return gl.exp2(x)


@gluon.jit
def await_predecessor():
    """Wait until the kernel before this one has ended and its writes are seen (programmatic dependent launch)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [0], gl.int32, False, 1
    )


@gluon.jit
def release_successor():
    """Let the kernel after this one start, once every CTA has come here; it waits for this one's end by itself."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [0], gl.int32, False, 1
    )


@gluon.jit
def prefetch_line(pointer):
    """Ask for the line of 128 bytes that holds a scalar pointer's target to come into L1."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointer.to(gl.int64, bitcast=True)],
        gl.int32,
        False,
        1,
    )
