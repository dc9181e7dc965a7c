"""The driver call beneath Triton's launcher objects, by Triton version.

A launcher object wraps a C function. Before it calls that function, Triton re-encodes every TMA
descriptor, which costs one to two microseconds each. This module finds the C function and the
encoder, so that a caller can keep encoded descriptors and pass addresses in place of tensors.

Tested with Triton 3.6.0 and 3.9.0. For other versions the launcher object itself is called, which
also accepts addresses but encodes descriptors, so kernels with descriptors are left to Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import triton

__all__ = ["DirectCall", "direct_call"]

_FIELDS = (
    "launch",
    "global_scratch_size",
    "profile_scratch_size",
    "launch_cooperative_grid",
    "launch_pdl",
)


class DirectCall(NamedTuple):
    """How to launch one compiled kernel: `call(*grid, stream, *head, *arguments)`.

    Attributes:
        call: accepts an address in place of a tensor and the result of `expand` in place of a
            descriptor. Compile-time arguments follow the runtime ones.
        head: the values between the stream and the arguments.
        packed: whether the arguments are passed as one tuple.
        expand: the arguments in place of the kernel's `number`-th descriptor, by (number,
            descriptor); None for kernels without descriptors.
        descriptor_layout: what the encoding depends on besides the descriptor, as text.
    """

    call: Callable[..., None]
    head: tuple[Any, ...]
    packed: bool = False
    expand: Callable[[int, Any], tuple[Any, ...]] | None = None
    descriptor_layout: str = ""


def direct_call(compiled: Any) -> DirectCall | None:
    """The driver call of a compiled kernel; None where it is not known."""
    launcher, function = getattr(compiled, "run", None), getattr(compiled, "function", None)
    metadata = getattr(compiled, "metadata", None)
    if function is None or not callable(launcher):
        return None
    if getattr(getattr(metadata, "target", None), "backend", "") != "cuda":
        return None  # on AMD, Triton also specializes on the size of a tensor's storage
    if type(launcher).__name__ != "CudaLauncher":
        return None
    if not all(hasattr(launcher, name) for name in _FIELDS):
        return None
    no_hooks = (compiled.packed_metadata, None, None, None)  # no launch metadata, no hooks
    has_descriptors = bool(getattr(metadata, "tensordesc_meta", None))
    general = None if has_descriptors else DirectCall(launcher, (function, *no_hooks))
    if (
        launcher.global_scratch_size
        or launcher.profile_scratch_size
        or getattr(launcher, "gsan_enabled", False)
    ):
        return general  # the launcher object allocates scratch memory at each launch
    flags, no_scratch = (launcher.launch_cooperative_grid, launcher.launch_pdl), (None, None)
    is_3_9 = hasattr(launcher, "arg_annotations") and hasattr(launcher, "kernel_signature")
    if triton.__version__.startswith("3.6.") and not hasattr(launcher, "arg_annotations"):
        head: tuple[Any, ...] = (function, *flags, *no_scratch, *no_hooks)
        return _c_function(launcher.launch, head, False, metadata)
    if triton.__version__.startswith("3.9.") and is_3_9:
        types = (launcher.arg_annotations, launcher.kernel_signature)
        head = (function, *flags, *no_hooks, *no_scratch, *types)
        return _c_function(launcher.launch, head, True, metadata)
    return general


def _c_function(
    launch: Any, head: tuple[Any, ...], packed: bool, metadata: Any
) -> DirectCall | None:
    """The call of the C function in `launch`; None where it is not found in its known place."""
    from triton.backends.nvidia import driver

    layouts = list(getattr(metadata, "tensordesc_meta", None) or [])
    cells = getattr(launch, "__closure__", None)
    if cells is None:  # a C function that nothing wraps: the kernel has no descriptors
        return None if layouts else DirectCall(launch, head, packed)
    names = launch.__code__.co_freevars
    wrapped = dict(zip(names, (cell.cell_contents for cell in cells), strict=True))
    function, encode = wrapped.get("launcher"), getattr(driver, "make_tensordesc_arg", None)
    if not callable(function) or not callable(encode) or not layouts:
        return None
    expand = functools.partial(_expand, encode, layouts, packed)
    return DirectCall(function, head, packed, expand, repr(layouts))


def _expand(
    encode: Callable[..., Any], layouts: list[Any], packed: bool, number: int, descriptor: Any
) -> tuple[Any, ...]:
    if packed:  # Triton 3.9 passes a third argument
        return tuple(encode(descriptor, layouts[number], None))
    return tuple(encode(descriptor, layouts[number]))
