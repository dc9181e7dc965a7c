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

from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.launch.driver import direct_call

__all__ = ["ALIGNMENT", "BoundLaunch", "Remembered", "undisturbed"]

_FIRST, _END = (3, 6), (3, 10)
"""Versions of Triton, from the first to before the end, whose launchers take the arguments as they are given here."""

ALIGNMENT = 15
"""Bits of an address that Triton looks at: it tells multiples of 16 from the rest."""

_JIT_RUN = getattr(JITFunction, "run", None)
_KNOBS: Any = getattr(triton, "knobs", None)


def _known_version() -> bool:
    found = re.match(r"(\d+)\.(\d+)", triton.__version__)
    return found is not None and _FIRST <= (int(found[1]), int(found[2])) < _END


def _known_switches() -> bool:
    runtime = ("launch_enter_hook", "launch_exit_hook", "debug", "add_stages_inspection_hook")
    return _JIT_RUN is not None and all(
        hasattr(getattr(_KNOBS, "runtime", None), name) for name in runtime
    )


_KNOWN = (
    _known_version() and _known_switches() and hasattr(_KNOBS.compilation, "instrumentation_mode")
)


def undisturbed() -> bool:
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
    combination, in caches whose keys hold dtypes, shapes and strides. (An integer that the kernel is not specialised on
    may differ too.)

    A kernel with TMA descriptors, or one whose tensors the caller knows by address only, has a quicker way: where
    `ready` says so, `go` takes encoded descriptors (`expand`) and addresses.

    Args:
        kernel: the `triton.jit` function; its parameters are the runtime arguments, then the compile-time ones.
        grid: programs along three dimensions.
        constants: compile-time arguments and options (`num_warps`, ...) by name.
    """

    __slots__ = (
        "_bare", "_call", "_compiled", "_constants", "_expand", "_grid", "_head", "_hooks", "_kernel", "_packed", "_stream",
        "_tail", "maps",
    )  # fmt: skip

    def __init__(self, kernel: Any, grid: tuple[int, int, int], constants: dict[str, Any]) -> None:
        self._kernel = kernel
        self._grid = grid
        self._constants = constants
        self._call: Callable[..., None] | None = None
        self._bare: Callable[..., None] | None = None
        self._expand: Callable[[int, Any], tuple[Any, ...]] | None = None
        self._packed = False
        self.maps = ""
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
        elif addresses & ALIGNMENT or self._hooks or not undisturbed():
            self._kernel[self._grid](*arguments, **self._constants)
        elif self._packed:
            call(*self._grid, self._stream(index), *self._head, (*arguments, *self._tail))
        else:
            call(*self._grid, self._stream(index), *self._head, *arguments, *self._tail)

    def ready(self, addresses: int) -> bool:
        """Whether `go` may take the next launch; `addresses` as in a call."""
        return (
            self._bare is not None and not (addresses & ALIGNMENT or self._hooks) and undisturbed()
        )

    @property
    def is_direct(self) -> bool:
        """Whether `go` may be taken, as far as the kernel alone can tell: for aligned addresses, while `undisturbed()`."""
        return self._bare is not None and not self._hooks

    @property
    def hooks(self) -> Any:
        """The kernel's own hooks, as a list that changes with them; while there is one, Triton has to launch."""
        return self._hooks

    @property
    def stream(self) -> Callable[[int], int]:
        """What tells the current stream of a device."""
        return self._stream

    def ending(self, *last: Any) -> Callable[..., None]:
        """`go` for launches whose last arguments are always the same, once `is_direct`: called with the stream and the
        arguments before those."""
        bare, grid, head, rest = self._bare, self._grid, self._head, (*last, *self._tail)
        assert bare is not None
        if self._packed:
            return lambda stream, *first: bare(*grid, stream, *head, (*first, *rest))
        return lambda stream, *first: bare(*grid, stream, *head, *first, *rest)

    def expand(self, number: int, descriptor: Any) -> tuple[Any, ...]:
        """What `go` takes in place of the kernel's `number`-th descriptor. It holds for every launch with equal `maps`,
        for it follows from that and the descriptor."""
        assert self._expand is not None  # who has descriptors and is `ready` has it
        return self._expand(number, descriptor)

    def go(self, arguments: tuple[Any, ...], index: int) -> None:
        """Launch as a call does, once `ready`, with expanded descriptors and tensors or addresses."""
        assert self._bare is not None
        if self._packed:
            self._bare(*self._grid, self._stream(index), *self._head, (*arguments, *self._tail))
        else:
            self._bare(*self._grid, self._stream(index), *self._head, *arguments, *self._tail)

    def _launch_and_bind(self, arguments: tuple[Any, ...], addresses: int) -> None:
        compiled = self._kernel[self._grid](*arguments, **self._constants)
        if (
            addresses & ALIGNMENT
            or not _KNOWN
            or chips.INTERPRETED
            or not isinstance(self._kernel, JITFunction)
        ):
            return
        names = [parameter.name for parameter in self._kernel.params if parameter.is_constexpr]
        in_order = not any(
            parameter.is_constexpr for parameter in self._kernel.params[: len(arguments)]
        )
        if (
            not in_order
            or len(arguments) + len(names) != len(self._kernel.params)
            or not undisturbed()
        ):
            return
        direct = direct_call(compiled)
        if direct is None:
            return
        self._hooks = self._kernel.pre_run_hooks
        self._stream = triton.runtime.driver.active.get_current_stream
        self._tail = tuple(self._constants[name] for name in names)
        self._head, self._packed, self._expand, self.maps = (
            direct.head,
            direct.packed,
            direct.expand,
            direct.maps,
        )
        self._compiled = compiled  # newer Tritons unload a kernel that nobody holds
        self._bare = direct.bare
        self._call = direct.call  # last, with the one before it: another thread may be launching


def _no_stream(index: int) -> int:
    raise RuntimeError(f"no stream of device {index}: this launch is not bound")
