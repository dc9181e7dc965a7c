"""Kernel launches that are bound once: repeated launches skip Triton's Python.

Triton's `kernel[grid](...)` classifies every argument again at each call, which costs 10 to 20
microseconds for the attention kernels. The compiled kernel depends on the type of each argument, on
the value class of each integer, and on whether each address is a multiple of 16. `BoundLaunch`
fixes all of these: it stands for one kernel, one grid, one device, fixed dtypes and fixed integers,
and its direct form is used only with aligned addresses. Triton would select the same kernel for
such arguments. Everything else (unaligned addresses, launch hooks, debug flags, the interpreter,
an untested Triton version) is launched by Triton.

A direct launch goes to the stream that the caller passes, so CUDA graphs capture it. It never
compiles: the first launch goes through Triton, whose hooks see every compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from attnlib.env import raw
from attnlib.ops.dispatch import runs_kernels
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.kernels.number_tables import has_tables
from attnlib.ops.triton.launch.driver import (
    CHANGES,
    DirectLaunch,
    Source,
    allow_shared_memory,
    direct_launch,
)
from attnlib.ops.triton.launch.settle import settle_keys

__all__ = [
    "ALIGNMENT",
    "CHANGES",
    "BoundLaunch",
    "Submit",
    "can_bypass_triton",
    "current_stream",
    "launches_observed",
]

ALIGNMENT = 15
"""Address bits that Triton specializes on: it distinguishes multiples of 16 from the rest."""

Submit = Callable[..., None]
"""Launches one kernel: `submit(stream, *arguments)`."""

_CPU = torch.device("cpu")
_JIT_RUN = getattr(JITFunction, "run", None)
_KNOBS: Any = getattr(triton, "knobs", None)


_KNOWN = _JIT_RUN is not None and all(
    hasattr(getattr(_KNOBS, group, None), name)
    for group, name in (
        ("runtime", "launch_enter_hook"),
        ("runtime", "launch_exit_hook"),
        ("runtime", "debug"),
        ("runtime", "add_stages_inspection_hook"),
        ("compilation", "instrumentation_mode"),
    )
)
"""Whether `launches_observed` can read everything that it has to."""


def launches_observed() -> bool:
    """True if a launch hook, a debug flag or a patched launcher is active. Every layer asks."""
    runtime = _KNOBS.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    try:
        if enter.calls or leave.calls:
            return True
    except AttributeError:  # something else took the place of Triton's list of hooks
        return True
    return bool(
        runtime.debug
        or runtime.add_stages_inspection_hook is not None
        or _KNOBS.compilation.instrumentation_mode
        or JITFunction.run is not _JIT_RUN
    )


def can_bypass_triton(kernels: Iterable[BoundLaunch]) -> bool:
    """Whether direct launches of all these kernels are possible now, given aligned tensors."""
    for kernel in kernels:  # a loop costs less than `all` over a generator
        if not kernel.is_direct:
            return False
    return not launches_observed()


def current_stream(index: int) -> int:
    """The current stream of device `index`, as the driver's handle."""
    return int(triton.runtime.driver.active.get_current_stream(index))


class BoundLaunch:
    """One kernel with one grid and fixed compile-time arguments.

    The owner guarantees that all calls agree in which arguments are tensors, in their dtypes, and
    in the values of all integers that the kernel is specialized on. Floats may differ: Triton does
    not specialize on them. Owners are cached under a signature with dtypes, shapes and strides.

    Args:
        kernel: the `triton.jit` function; runtime parameters first, then compile-time ones.
        grid: programs along three dimensions.
        constants: compile-time arguments and options (`num_warps`, ...) by name.

    Attributes:
        hooks: the kernel's own launch hooks, as a list that changes with them.
    """

    __slots__ = (
        "_compiled",
        "_constants",
        "_direct",
        "_grid",
        "_kernel",
        "_submit",
        "hooks",
    )

    def __init__(self, kernel: Any, grid: tuple[int, int, int], constants: dict[str, Any]) -> None:
        self._kernel = kernel
        self._grid = grid
        self._constants = constants
        self._compiled: object = None
        self._direct: DirectLaunch | None = None
        self._submit: Submit | None = None
        self.hooks: Any = getattr(kernel, "pre_run_hooks", ())
        settle_keys(kernel, *constants.values())
        if raw("ATTNLIB_KERNELS") and not runs_kernels(_CPU):  # else a GPU is described
            import_module("attnlib.ops.triton.launch.kernel_folder").use_kernel_folder()

    @property
    def is_direct(self) -> bool:
        """Whether direct launches are possible, given aligned addresses and `not
        launches_observed()`. False until the first launch by Triton, and where the driver call of
        this Triton version is not known."""
        return self._direct is not None and not self.hooks

    @property
    def encode(self) -> Callable[[int, Any], Any] | None:
        """The encoded form of the kernel's `number`-th descriptor, by (number, descriptor); None
        for kernels without descriptors and before the first launch."""
        return None if self._direct is None else self._direct.encode

    @property
    def descriptor_layout(self) -> str:
        """How the kernel reads its descriptors; equal layouts share encodings."""
        return "" if self._direct is None else self._direct.descriptor_layout

    def by_triton(self, arguments: tuple[Any, ...], aligned: bool) -> None:
        """Launch through Triton on the current stream. After the first aligned launch, direct
        launches are possible.

        Args:
            arguments: the runtime arguments in the kernel's order, tensors as tensors.
            aligned: whether every address that the kernel is specialized on is a multiple of 16.
        """
        has_own = self._direct is None and has_tables(self._constants.get("CONFIG"))
        if has_own and not chips.INTERPRETED:
            compiled = self._kernel.warmup(*arguments, grid=self._grid, **self._constants)
            allow_shared_memory(compiled)
        compiled = self._kernel[self._grid](*arguments, **self._constants)
        if aligned and self._direct is None:
            self._keep_driver_call(compiled, len(arguments))

    def bind(self, direct: bool, aligned: bool, arguments: tuple[Any, ...]) -> Submit:
        """`submit(stream, *changing)` with some arguments in place.

        Args:
            direct: launch without Triton; arguments are addresses and numbers then, and a
                descriptor is its encoded form, its shape and its strides. Otherwise they are
                tensors and descriptors, and Triton launches on the current stream, whatever
                `stream` is given.
            aligned: for launches by Triton, whether every address is a multiple of 16.
            arguments: all runtime arguments, a `Source` for those of a call.
        """
        if direct:
            assert self._direct is not None  # the caller has checked `is_direct`
            return self._direct.bind(self._grid, arguments)

        slots = [number for number, x in enumerate(arguments) if isinstance(x, Source)]

        def by_triton(stream: int, *changing: Any) -> None:
            filled = list(arguments)
            for slot, value in zip(slots, changing, strict=True):
                filled[slot] = value
            self.by_triton(tuple(filled), aligned)

        return by_triton

    def run(self, arguments: tuple[Any, ...], addresses: int, index: int) -> None:
        """Launch once on the current stream of device `index`, which is the current device.

        Args:
            arguments: the runtime arguments in the kernel's order, tensors as tensors.
            addresses: the addresses that the kernel is specialized on, joined by `|`.
        """
        aligned = not addresses & ALIGNMENT
        if aligned and self.is_direct and not launches_observed():
            given = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
            if self._submit is None:
                self._submit = self.bind(True, True, (CHANGES,) * len(given))
            self._submit(current_stream(index), *given)
        else:
            self.by_triton(arguments, aligned)

    def _keep_driver_call(self, compiled: Any, num_arguments: int) -> None:
        if not _KNOWN or chips.INTERPRETED or not isinstance(self._kernel, JITFunction):
            return
        parameters = self._kernel.params
        is_constant = [parameter.is_constexpr for parameter in parameters]
        if any(is_constant[:num_arguments]) or not all(is_constant[num_arguments:]):
            return
        if launches_observed():
            return
        found = direct_launch(compiled, num_arguments)
        if found is not None:
            self._compiled = compiled  # Triton 3.9 unloads a kernel that nothing references
            self._direct = found  # set last: another thread may be launching
