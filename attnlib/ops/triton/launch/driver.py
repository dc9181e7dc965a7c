"""Launches beneath Triton's launcher objects: most arguments in place, the rest converted in C.

Triton's launcher receives every argument as a Python object, encodes every TMA descriptor again,
and reads its hooks, at each call. `native.c` keeps the arguments of a batch as machine words and
calls `cuLaunchKernelEx` as Triton does. It is compiled on first use by Triton's own build function,
which Triton needs for its launchers as well, and is kept in Triton's cache.

Tested with Triton 3.6.0 and 3.9.0. Kernels of other versions, and kernels that need scratch memory
or clusters, are launched by Triton.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

__all__ = ["CHANGES", "DirectLaunch", "Source", "allow_shared_memory", "direct_launch"]


class Source(int):
    """In the place of an argument that each call gives. `launch.sequence` numbers them."""


CHANGES = Source(-100)
"""An argument without a number."""

_VERSIONS = ("3.6.", "3.9.")
_KINDS = {
    **dict.fromkeys(("i1", "i8", "i16", "i32", "u1", "u8", "u16", "u32"), b"i"),
    **{"i64": b"l", "fp32": b"f", "f32": b"f", "fp64": b"d", "nvTmaDesc": b"t", "constexpr": b"x"},
}
"""How `native.c` passes an argument, by Triton's type. Others are left to Triton."""
_SHARED_SIZE, _MOST_DYNAMIC = 1, 8
"""Attributes of a function of the driver: its own shared memory, and how much a launch may add."""
_LARGEST_SHARED = 228 * 1024
"""Bytes of shared memory above which Triton sets one more launch attribute."""


class DirectLaunch(NamedTuple):
    """How to launch one compiled kernel.

    Attributes:
        function: the driver's handle.
        threads: per CTA.
        shared: bytes of shared memory per CTA.
        cooperative, pdl: launch attributes.
        kinds: how each argument is passed, one byte each (`native.c`); descriptors are expanded.
        encode: the encoded form of the kernel's `number`-th descriptor, by (number, descriptor);
            None for kernels without descriptors.
        descriptor_layout: what the encoding depends on besides the descriptor, as text.
    """

    function: Any
    threads: int
    shared: int
    cooperative: bool
    pdl: bool
    kinds: bytes
    encode: Callable[[int, Any], Any] | None = None
    descriptor_layout: str = ""

    def bind(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> Callable[..., None]:
        """`launch(stream, *changing)`.

        Args:
            grid: programs along three dimensions.
            arguments: addresses and numbers, a `Source` for those of a call. In place of a
                descriptor stand its encoded form, its shape and its strides.
        """
        # Every step binds its launches: lists are quicker than generators here.
        slots = [number for number, argument in enumerate(arguments) if type(argument) is Source]
        values = list(arguments)
        for slot in slots:
            values[slot] = None
        sizes = (*grid, self.threads, self.shared, self.cooperative, self.pdl)
        create = new_launch()
        assert create is not None  # `direct_launch` has made sure
        launch: Callable[..., None] = create(
            self.function, sizes, self.kinds, tuple(slots), tuple(values)
        )
        return launch


def direct_launch(compiled: Any, num_arguments: int) -> DirectLaunch | None:
    """How to launch a compiled kernel; None where Triton has to do it.

    Args:
        compiled: Triton's compiled kernel.
        num_arguments: its runtime arguments, which come before the compile-time ones.
    """
    launcher: Any = getattr(compiled, "run", None)
    function = getattr(compiled, "function", None)
    metadata = getattr(compiled, "metadata", None)
    if function is None or type(launcher).__name__ != "CudaLauncher":
        return None
    if getattr(getattr(metadata, "target", None), "backend", "") != "cuda":
        return None  # on AMD, Triton also specializes on the size of a tensor's storage
    if not triton.__version__.startswith(_VERSIONS):
        return None
    if (
        launcher.global_scratch_size
        or launcher.profile_scratch_size
        or getattr(launcher, "gsan_enabled", False)
    ):
        return None  # the launcher object allocates scratch memory at each launch
    num_warps, num_ctas, shared = compiled.packed_metadata
    layouts = list(getattr(metadata, "tensordesc_meta", None) or [])
    types = list(compiled.src.signature.values())[:num_arguments]
    kinds = _kinds(types, bool(layouts))
    if num_ctas != 1 or shared > _LARGEST_SHARED or kinds is None or new_launch() is None:
        return None
    return DirectLaunch(
        function,
        threads=32 * num_warps,
        shared=shared,
        cooperative=bool(launcher.launch_cooperative_grid),
        pdl=bool(launcher.launch_pdl),
        kinds=kinds,
        encode=functools.partial(_encode, layouts) if layouts else None,
        descriptor_layout=repr(layouts),
    )


def allow_shared_memory(compiled: Any) -> None:
    """Let a kernel with shared memory of its own have as much in all as the device has. Triton does
    so where the part that it counts exceeds 48 KB, beyond which the driver asks for this.

    Raises:
        RuntimeError: the driver refuses.
    """
    if not isinstance(compiled, triton.compiler.CompiledKernel):
        return  # launches are only noted
    assert compiled.run is not None  # loads the kernel
    driver = triton.runtime.driver.active
    most = driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]
    cuda, own = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    function = ctypes.c_void_p(compiled.function)
    failed = cuda.cuFuncGetAttribute(ctypes.byref(own), _SHARED_SIZE, function)
    failed = failed or cuda.cuFuncSetAttribute(function, _MOST_DYNAMIC, most - own.value)
    if failed:
        raise RuntimeError(f"the driver refuses {most} bytes of shared memory (error {failed})")


def _kinds(types: list[Any], encoded: bool) -> bytes | None:
    """How arguments of Triton's types are passed; None where `native.c` cannot pass one."""
    kinds = bytearray()
    for text in types:
        if not isinstance(text, str):
            return None
        if text.startswith("*"):
            kinds += b"p"
        elif text in _KINDS:
            kinds += _KINDS[text]
        elif match := re.match(r"tensordesc<[^[>]*\[([^]]*)\]", text):
            if not encoded:
                return None
            dims = match[1].count(",") + 1
            kinds += b"t" + b"i" * dims + b"l" * dims
        else:
            return None
    return bytes(kinds)


def _encode(layouts: list[Any], number: int, descriptor: Any) -> Any:
    from triton.backends.nvidia import driver

    encode: Callable[..., Any] = driver.make_tensordesc_arg
    if triton.__version__.startswith("3.6."):
        return encode(descriptor, layouts[number])[0]
    return encode(descriptor, layouts[number], None)[0]


class Native:
    """The module of `native.c`, `sequence.c` and `check.c`, compiled by Triton's build function.

    Attributes:
        module: the module.
    """

    def __init__(self) -> None:
        from triton.backends.nvidia import driver
        from triton.runtime import build

        folder = Path(__file__).parent
        names = ("native.c", "sequence.c", "check.c")
        source = "\n".join((folder / name).read_text() for name in names)
        self.module = build.compile_module_from_src(
            src=source, name="attnlib_native", include_dirs=driver.include_dirs
        )
        self.module.use_tensor_type(torch.Tensor)

    @cached_property
    def new_launch(self) -> Callable[..., Any] | None:
        """The constructor of launches, without its first argument; None where CUDA's driver library
        is not there."""
        try:
            from triton.backends.nvidia import driver

            self.module.use_tensor_map_type(driver.PyCUtensorMap)
            library = ctypes.CDLL("libcuda.so.1")
            names = ("cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxSetCurrent")
            functions = tuple(
                ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names
            )
        except Exception:  # Triton launches then
            _warn_of_slow_launches()
            return None
        return functools.partial(self.module.Launch, functions)


@functools.cache
def load_native() -> Native | None:
    """Compile and import the launcher on first use; None where it cannot be compiled."""
    try:
        return Native()
    except Exception:  # a compiler may fail in any way; Triton launches then
        _warn_of_slow_launches()
        return None


def _warn_of_slow_launches() -> None:
    logging.getLogger(__name__).warning(
        "attnlib's launcher could not be compiled or has no driver library; kernels are launched "
        "by Triton, which takes more host time",
        exc_info=True,
    )


def new_launch() -> Callable[..., Any] | None:
    """The constructor of `native.c`'s launches, without its first argument; None where it cannot be
    compiled or CUDA's driver library is not there."""
    native = load_native()
    return None if native is None else native.new_launch


def compile_native() -> Any:
    """The compiled module. It exists wherever `new_launch` is not None."""
    native = load_native()
    assert native is not None  # callers have launched directly before
    return native.module
