"""Names of Gluon that differ between releases of Triton, and PTX instructions that Gluon lacks.

Names under `triton.experimental` move between minor releases. Kernels import them from here, so
that only this module depends on the release. Compiled with Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core

__all__ = [
    "TensorDescriptor", "Value", "aggregate", "arrive_after_copies", "commit_copies",
    "consumers_sync", "copy_to_shared", "exp2", "launch_dependent_grids", "load_box", "log2",
    "opaque_zero", "partition_barrier", "prefetch_l1", "prefetch_l2", "prefetch_rows",
    "reinterpret", "rounded_product", "store_in_l2", "wait_for_copies", "wait_on_dependent_grids",
]  # fmt: skip

Value = core.base_value
"""Annotation of a field of an `aggregate` that holds a tensor, a pointer, shared memory, another
aggregate, a tuple or None. A field annotated `gl.constexpr` holds a constant."""

_Class = TypeVar("_Class", bound=type)


def aggregate(cls: _Class) -> _Class:
    """Make a class of annotated fields a value that Gluon functions build, pass and return.

    The constructor takes the fields in order or by name. Fields cannot be assigned later. Methods
    are `@gluon.jit` functions that take `self`. A file that defines one must not import
    `annotations` from `__future__`: Triton 3.6 checks the values of fields against the annotations.

    Triton 3.9 exports a decorator that also writes the constructor; 3.6 has a private one only,
    which takes None, numbers and tuples as they are and then finds no type for them.
    """
    names = list(cls.__annotations__)
    missing = object()

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        values = {name: missing for name in names}
        values.update(zip(names, args, strict=False))
        if len(args) > len(names) or not kwargs.keys() <= values.keys():
            raise TypeError(f"{cls.__name__} takes the fields {', '.join(names)}")
        values.update(kwargs)
        for name, value in values.items():
            if value is missing:
                raise TypeError(f"{cls.__name__} misses the field {name}")
            setattr(self, name, _as_value(value))

    # Triton calls functions with this mark while it compiles, with values as arguments.
    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    value_class = core._aggregate(cls)
    # Part of the key of compiled kernels; 3.6 leaves it empty.
    value_class.__annotations__ = inspect.get_annotations(cls)
    return value_class


def _as_value(field: Any) -> Any:
    """Return a field of an aggregate as a value that has a type of Triton."""
    if isinstance(field, core.tuple):
        return _tuple_value(field.values, field.type.fields)
    if isinstance(field, tuple):
        return _tuple_value(field, getattr(field, "_fields", None))
    return field if isinstance(field, core.base_value) else gl.constexpr(field)


def _tuple_value(items: Any, names: Any) -> Any:
    values = [_as_value(item) for item in items]
    return core.tuple(values, core.tuple_type([value.type for value in values], names))


partition_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Synchronize the threads of the calling warp partition (`thread_barrier` up to Triton 3.6)."""

load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Issue a TMA load of one box into shared memory; its bytes are counted by an mbarrier
(`async_copy_global_to_shared` up to Triton 3.7)."""

copy_to_shared = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)
"""Issue `cp.async` of a tensor of pointers into shared memory; 0 outside of the mask
(`async_copy_global_to_shared` up to Triton 3.7)."""

arrive_after_copies = async_copy.mbarrier_arrive
"""Each thread arrives on an mbarrier when the copies that it has issued are complete."""
commit_copies, wait_for_copies = async_copy.commit_group, async_copy.wait_group
"""Make a group of the copies since the last one; wait until at most so many groups are pending."""

_REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
_VIEWS_HAVE_EQUAL_SIZES = gl.constexpr(triton.__version__.startswith("3.8."))


@gluon.constexpr_function
def _filling_shape(shape, dtype, bits):
    """Return `shape` with as many rows as make it `bits` in all."""
    row = dtype.primitive_bitwidth
    for size in shape[1:]:
        row *= size
    return [bits // row, *shape[1:]]


@gluon.constexpr_function
def _bits(shape, dtype):
    bits = dtype.primitive_bitwidth
    for size in shape:
        bits *= size
    return bits


@gluon.jit
def reinterpret(tile, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """View shared memory, or its beginning, in another dtype, shape and layout.

    The method is `_reinterpret` up to Triton 3.8, and that of 3.8 does not view a part.
    """
    if _REINTERPRET_IS_PUBLIC:
        view = tile.reinterpret(DTYPE, SHAPE, LAYOUT)
    elif _VIEWS_HAVE_EQUAL_SIZES:
        WHOLE: gl.constexpr = _filling_shape(SHAPE, DTYPE, _bits(tile.shape, tile.dtype))
        view = tile._reinterpret(DTYPE, WHOLE, LAYOUT)
        if WHOLE[0] != SHAPE[0]:
            view = view.slice(0, SHAPE[0])
    else:
        view = tile._reinterpret(DTYPE, SHAPE, LAYOUT)
    return view


@gluon.jit
def consumers_sync(CONSUMERS: gl.constexpr):
    """Synchronize the 1 to 3 consumer warpgroups with each other, not with the loader warps."""
    # Named barrier 11: Triton 3.6 to 3.9 do not use the numbers 9 to 14 themselves. The thread
    # count is part of the instruction, so each number of consumers has a literal of its own.
    if CONSUMERS == 1:
        partition_barrier()
    elif CONSUMERS == 3:
        gl.inline_asm_elementwise(
            "bar.sync 11, 384; mov.b32 $0, $1;", "=r,r", [0], gl.int32, False, 1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.sync 11, 256; mov.b32 $0, $1;", "=r,r", [0], gl.int32, False, 1
        )


@gluon.jit
def opaque_zero():
    """Return 0 in a way that the compiler does not see."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [0], gl.int32, False, 1)


@gluon.jit
def exp2(x):
    """Return 2 ** x."""
    return gl.exp2(x)


@gluon.jit
def rounded_product(a, b):
    """Return a * b, which a sum with another product rounds first. Which product of a sum LLVM
    rounds, and which one it fuses with the addition, depends on the rest of the kernel."""
    return gl.fma(a, b, 0.0)


@gluon.jit
def log2(x):
    """Return the base-2 logarithm of a normal x > 0, with an absolute error of about 2^-22."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def wait_on_dependent_grids():
    """Wait until the previous kernel has ended and its writes are visible (PDL)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [0], gl.int32, False, 1
    )


@gluon.jit
def launch_dependent_grids():
    """Allow the next kernel to start once every CTA has called this or has ended (PDL).

    The next kernel waits for this one's results by itself, with `wait_on_dependent_grids`.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [0], gl.int32, False, 1
    )


@gluon.jit
def store_in_l2(pointers, values, mask):
    """Store float32 values that the L2 cache keeps while other data streams through it.

    For values that a later kernel reads, among keys and values that are read once.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred %p;
        .reg .b64 %policy;
        setp.ne.s32 %p, $3, 0;
        createpolicy.fractional.L2::evict_last.b64 %policy, 1.0;
        @%p st.global.L2::cache_hint.f32 [$1], $2, %policy;
        mov.b32 $0, 0;
        }""",
        "=r,l,f,r",
        [pointers.to(gl.int64, bitcast=True), values, mask.to(gl.int32)],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def prefetch_l1(pointer):
    """Prefetch the 128-byte line that contains the target of a scalar pointer into L1."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointer.to(gl.int64, bitcast=True)],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def prefetch_l2(pointer, size):
    """Prefetch `size` bytes from the target of a scalar pointer on into the L2 cache, by one thread
    of each warp; both are multiples of 16."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred %first;
        .reg .b32 %lane;
        mov.u32 %lane, %laneid;
        setp.eq.u32 %first, %lane, 0;
        @%first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [pointer.to(gl.int64, bitcast=True), size],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def prefetch_rows(pointers, size, mask):
    """Prefetch `size` bytes from the targets of a tensor of pointers on into the L2 cache where
    `mask` is true; all are multiples of 16."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred %first;
        setp.ne.s32 %first, $3, 0;
        @%first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [pointers.to(gl.int64, bitcast=True), size, mask.to(gl.int32)],
        gl.int32,
        False,
        1,
    )
