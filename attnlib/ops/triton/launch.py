"""Kernel launches that are bound once: a repeated launch skips Triton's Python and calls the compiled kernel itself.

Triton's `kernel[grid](...)` classifies every argument again at each call, 10 to 20 microseconds for the attention
kernels. What decides which compiled kernel runs is the type of each argument, the value class of an integer, and whether
an address is a multiple of 16. `BoundLaunch` takes all of it out of the call: it stands for one kernel, one grid, one
device, fixed dtypes and fixed values of every number, and it is used only while the addresses are aligned. So it cannot
meet arguments for which Triton would have chosen another kernel; anything else, and everything out of the ordinary
(hooks, debug switches, the interpreter, another Triton), goes Triton's own way.

A bound launch reads the current stream at each call, as Triton does, so it is captured in CUDA graphs like any other.
It never compiles: the first launch goes through Triton, whose hooks see every compilation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import triton
from triton.runtime.jit import JITFunction

from attnlib.ops.triton import device as chips

__all__ = ["BoundLaunch", "Remembered"]

_FIRST, _END = (3, 6), (3, 10)
"""Versions of Triton, from the first to before the end, whose launchers take the arguments as they are given here."""

_ALIGNMENT = 15
"""Bits of an address that Triton looks at: it tells multiples of 16 from the rest."""

_JIT_RUN = getattr(JITFunction, "run", None)
_KNOBS = getattr(triton, "knobs", None)


def _known_version() -> bool:
    found = re.match(r"(\d+)\.(\d+)", triton.__version__)
    return found is not None and _FIRST <= (int(found[1]), int(found[2])) < _END


def _known_switches() -> bool:
    runtime = ("launch_enter_hook", "launch_exit_hook", "debug", "add_stages_inspection_hook")
    return _JIT_RUN is not None and all(hasattr(getattr(_KNOBS, "runtime", None), name) for name in runtime)


_KNOWN = _known_version() and _known_switches() and hasattr(_KNOBS.compilation, "instrumentation_mode")


def _undisturbed() -> bool:
    """Whether nobody listens to launches, changes how kernels are compiled, or has replaced Triton's launcher."""
    runtime = _KNOBS.runtime
    return not (
        getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
        or runtime.debug
        or runtime.add_stages_inspection_hook is not None
        or _KNOBS.compilation.instrumentation_mode
        or JITFunction.run is not _JIT_RUN
    )


T = TypeVar("T")


class Remembered(dict[Hashable, T]):
    """Launches by key, a few thousand at most: when it is full it starts over, and each launch is worked out again."""

    _LIMIT = 4096

    def keep(self, key: Hashable, launch: T) -> T:
        """Store and return `launch`."""
        if len(self) >= self._LIMIT:
            self.clear()
        self[key] = launch
        return launch


class BoundLaunch:
    """The launches of one kernel on one device that agree in everything but the addresses of their tensors.

    Whoever makes one promises that all its calls agree in: which arguments are tensors, their dtypes, and the values of
    all integers. Floats may differ (Triton does not look at their values). The callers keep one object for each
    combination, in caches whose keys hold dtypes, shapes and strides.

    Args:
        kernel: the `triton.jit` function; its parameters are the runtime arguments, then the compile-time ones.
        grid: programs along three dimensions.
        constants: compile-time arguments and options (`num_warps`, ...) by name.
    """

    __slots__ = ("_call", "_compiled", "_constants", "_grid", "_head", "_hooks", "_kernel", "_stream", "_tail")

    def __init__(self, kernel: Any, grid: tuple[int, int, int], constants: dict[str, Any]) -> None:
        self._kernel = kernel
        self._grid = grid
        self._constants = constants
        self._call: Callable[..., None] | None = None
        self._compiled: object = None
        self._head: tuple[Any, ...] = ()
        self._tail: tuple[Any, ...] = ()
        self._hooks: Any = ()
        self._stream: Callable[[int], int] = _no_stream

    @property
    def is_bound(self) -> bool:
        """Whether the compiled kernel is at hand."""
        return self._call is not None

    def __call__(self, arguments: tuple[Any, ...], addresses: int, index: int) -> None:
        """Launch on the current stream of device `index`, which must be the current device.

        Args:
            arguments: the runtime arguments in the kernel's order.
            addresses: the addresses, joined by `|`, of all tensors whose alignment the kernel is specialised on.
            index: the device's number.
        """
        call = self._call
        if call is None:
            self._launch_and_bind(arguments, addresses)
        elif addresses & _ALIGNMENT or self._hooks or not _undisturbed():
            self._kernel[self._grid](*arguments, **self._constants)
        else:
            call(*self._grid, self._stream(index), *self._head, *arguments, *self._tail)

    def _launch_and_bind(self, arguments: tuple[Any, ...], addresses: int) -> None:
        compiled = self._kernel[self._grid](*arguments, **self._constants)
        if addresses & _ALIGNMENT or not _KNOWN or chips.INTERPRETED or not isinstance(self._kernel, JITFunction):
            return
        names = [parameter.name for parameter in self._kernel.params if parameter.is_constexpr]
        in_order = not any(parameter.is_constexpr for parameter in self._kernel.params[: len(arguments)])
        if not in_order or len(arguments) + len(names) != len(self._kernel.params) or not _undisturbed():
            return
        direct = _direct_call(compiled)
        if direct is None:
            return
        self._hooks = self._kernel.pre_run_hooks
        self._stream = triton.runtime.driver.active.get_current_stream
        self._tail = tuple(self._constants[name] for name in names)
        self._head = direct[1]
        self._compiled = compiled  # newer Tritons unload a kernel that nobody holds
        self._call = direct[0]  # last: another thread may be launching


def _direct_call(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    """A function that launches, and what it takes between the stream and the kernel's arguments; None if unknown."""
    launcher, function = getattr(compiled, "run", None), getattr(compiled, "function", None)
    target = getattr(getattr(compiled, "metadata", None), "target", None)
    if function is None or not callable(launcher) or getattr(target, "backend", "") != "cuda":
        return None  # on AMD Triton also looks at the size of a tensor's memory
    metadata = (compiled.packed_metadata, None, None, None)  # no launch metadata, no hooks
    fields = ("launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if type(launcher).__name__ != "CudaLauncher" or not all(hasattr(launcher, name) for name in fields):
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return launcher, (function, *metadata)
    if triton.__version__.startswith("3.6.") and not hasattr(launcher, "arg_annotations"):
        flags = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)  # and no scratch memory
        return launcher.launch, (function, *flags, *metadata)
    return launcher, (function, *metadata)


def _no_stream(index: int) -> int:
    raise RuntimeError(f"no stream of device {index}: this launch is not bound")
