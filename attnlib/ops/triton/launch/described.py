"""Kernels for a GPU that this machine does not have: launches on the CPU that only compile.

Inside `described_gpu`, operations on tensors of the CPU choose kernels, tiles and grids for the
GPU as they do on it, and Triton specializes every launch as it does there. The kernel that results
is noted, and compiled if wanted, but nothing is launched. Memory of the CPU starts on 64-byte
boundaries, that of a GPU on 512: alignment follows from offsets on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attnlib.errors import BackendUnavailableError
from attnlib.ops.dispatch import cpu_as_gpu
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of_cpu
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.keys import kernel_key

__all__ = [
    "Launches",
    "NeededKernel",
    "NotLaunched",
    "described_gpu",
    "observed_launches",
    "target_of",
]


class NeededKernel(NamedTuple):
    """A kernel that launches need.

    Attributes:
        name: of the kernel function.
        key: its name in Triton's cache, 64 hexadecimal digits.
    """

    name: str
    key: str


Take = Callable[[NeededKernel, Callable[[], Any]], None]
"""`take(kernel, compile)`: what happens to a kernel that launches need; `compile()` compiles it, or
finds it in Triton's cache, and returns Triton's compiled kernel."""


def target_of(limits: DeviceLimits) -> GPUTarget:
    """What Triton compiles for, on NVIDIA."""
    return GPUTarget("cuda", 10 * limits.capability[0] + limits.capability[1], 32)


class Launches:
    """What calls inside `described_gpu` launch."""

    def __init__(self) -> None:
        self.kernels: set[object] = set()

    def of(self, call: Callable[[], None]) -> frozenset[object]:
        """The kernels that a call launches, as objects that stand for them."""
        self.kernels.clear()
        call()
        return frozenset(self.kernels)


_observed: Launches | None = None


def observed_launches() -> Launches | None:
    """The launches inside `described_gpu`, where they are observed; None elsewhere."""
    return _observed


@contextmanager
def described_gpu(
    limits: DeviceLimits, take: Take, launches: Launches | None = None
) -> Iterator[None]:
    """Inside, launches on tensors of the CPU are those of a GPU with these limits.

    Not for several threads.

    Args:
        limits: the GPU.
        take: called once for each kernel that the launches inside need.
        launches: observes them; None for nobody.

    Raises:
        BackendUnavailableError: an AMD GPU, a process that interprets Triton, or a Triton release
            that compiles in another way.
    """
    _check(limits)
    global _observed
    driver, own_compile, seen = _Driver(target_of(limits)), JITFunction._do_compile, set()

    def take_kernel(
        self: Any, key: str, signature: Any, device: Any, constants: Any, options: Any, *rest: Any
    ) -> NotLaunched:
        seen.add(self)
        kernels, *_, backend, _ = self.device_caches[device]
        source = self.ASTSource(self, signature, constants, rest[0])
        found = NeededKernel(self.fn.__name__, kernel_key(source, backend, options))
        arguments = (key, signature, device, constants, options, *rest)
        take(found, lambda: own_compile(self, *arguments))
        made = kernels[key] = NotLaunched()
        return made

    config: Any = triton.runtime.driver
    active = config._active
    LAUNCHES.clear()  # their keys name a device, not a chip
    config.set_active(driver)
    JITFunction._do_compile = take_kernel
    _observed = launches
    try:
        with cpu_as_gpu(), limits_of_cpu(limits):
            yield
    finally:
        _observed = None
        JITFunction._do_compile = own_compile
        config._active = active
        LAUNCHES.clear()
        for kernel in seen:
            kernel.device_caches.pop(driver, None)


def _check(limits: DeviceLimits) -> None:
    if limits.is_amd:
        raise BackendUnavailableError(
            "kernels are compiled ahead of time for NVIDIA GPUs only: on AMD, Triton also "
            "specializes them on the sizes of tensors; run attnlib.warmup on the machine"
        )
    if chips.INTERPRETED:
        raise BackendUnavailableError(
            "this process interprets Triton: unset TRITON_INTERPRET to compile kernels"
        )
    if not hasattr(JITFunction, "_do_compile"):
        raise BackendUnavailableError(
            f"Triton {triton.__version__} compiles in another way than the tested releases: "
            'pip install "triton>=3.6,<3.10"'
        )


class _Driver:
    """What Triton asks of its driver to specialize a launch: one current device. The driver object
    itself names it, so that kernels of other devices are not found."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> _Driver:
        return self

    def get_current_stream(self, device: Any) -> int:
        return 0


class NotLaunched:
    """In the place of a compiled kernel."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None:
        """No launch hook sees it."""

    def run(self, *arguments: Any) -> None:
        """Launch nothing."""
        if _observed is not None:
            _observed.kernels.add(self)
