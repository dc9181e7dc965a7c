"""What lies under Triton's launcher objects, release by release: how a compiled kernel is launched without Triton's Python.

A launcher wraps a function in C. On the way there Triton encodes every TMA descriptor anew, a microsecond or two for
each; here the encoded form can be had by itself, so that whoever launches again with the same descriptor can keep it.
Seen: Triton 3.6.0 and 3.9.0. The releases between them launch through the launcher object, whose call they share, and
for everything else Triton's own way remains.
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
    """How one compiled kernel is launched: `call(*grid, stream, *head, *arguments)`, or with `(arguments,)` at the end.

    Attributes:
        call: takes arguments as Triton's own `kernel[grid]` does, compile-time ones included.
        head: what stands between the stream and the arguments.
        packed: whether the arguments are passed as one tuple.
        bare: the function in C that `call` ends in: it takes what `expand` makes of a descriptor in the descriptor's
            place, and an address in that of a tensor. None where that is not known.
        expand: what the kernel takes in place of its `number`-th descriptor, by (number, descriptor); None with `bare`.
        maps: what beside the descriptors themselves decides what `expand` returns, as text.
    """

    call: Callable[..., None]
    head: tuple[Any, ...]
    packed: bool = False
    bare: Callable[..., None] | None = None
    expand: Callable[[int, Any], tuple[Any, ...]] | None = None
    maps: str = ""


def direct_call(compiled: Any) -> DirectCall | None:
    """How to launch a compiled kernel; None where that is not known."""
    launcher, function = getattr(compiled, "run", None), getattr(compiled, "function", None)
    metadata = getattr(compiled, "metadata", None)
    if (
        function is None
        or not callable(launcher)
        or getattr(getattr(metadata, "target", None), "backend", "") != "cuda"
    ):
        return None  # on AMD Triton also looks at the size of a tensor's memory
    if type(launcher).__name__ != "CudaLauncher" or not all(
        hasattr(launcher, name) for name in _FIELDS
    ):
        return None
    no_hooks = (compiled.packed_metadata, None, None, None)  # no launch metadata, no hooks
    ordinary = DirectCall(launcher, (function, *no_hooks))
    if (
        launcher.global_scratch_size
        or launcher.profile_scratch_size
        or getattr(launcher, "gsan_enabled", False)
    ):
        return ordinary
    flags, no_scratch = (launcher.launch_cooperative_grid, launcher.launch_pdl), (None, None)
    if triton.__version__.startswith("3.6.") and not hasattr(launcher, "arg_annotations"):
        return _with_bare(
            DirectCall(launcher.launch, (function, *flags, *no_scratch, *no_hooks)), metadata
        )
    if (
        triton.__version__.startswith("3.9.")
        and hasattr(launcher, "arg_annotations")
        and hasattr(launcher, "kernel_signature")
    ):
        signature = (launcher.arg_annotations, launcher.kernel_signature)
        return _with_bare(
            DirectCall(
                launcher.launch, (function, *flags, *no_hooks, *no_scratch, *signature), True
            ),
            metadata,
        )
    return ordinary


def _with_bare(known: DirectCall, metadata: Any) -> DirectCall:
    """With the function in C, where it is found as it was in the releases seen."""
    from triton.backends.nvidia import driver

    maps, encode = (
        list(getattr(metadata, "tensordesc_meta", None) or []),
        getattr(driver, "make_tensordesc_arg", None),
    )
    code: Any = getattr(known.call, "__code__", None)
    cells = getattr(known.call, "__closure__", None)
    if cells is None:  # no descriptors, nothing is wrapped
        return known._replace(bare=known.call) if not maps else known
    inner = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)).get(
        "launcher"
    )
    if not callable(inner) or not callable(encode) or not maps:
        return known
    return known._replace(
        bare=inner, expand=functools.partial(_expanded, encode, maps, known.packed), maps=repr(maps)
    )


def _expanded(
    encode: Callable[..., Any], maps: list[Any], packed: bool, number: int, descriptor: Any
) -> tuple[Any, ...]:
    return tuple(
        encode(descriptor, maps[number], None) if packed else encode(descriptor, maps[number])
    )
