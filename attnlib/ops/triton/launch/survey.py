"""Which kernels launches need, before any of them runs: new kernels are compiled in threads.

Triton's compiler holds Python's lock while it reads the source of a kernel, about a quarter of the
time. Its passes, LLVM, ptxas and the C compiler run beside those of other kernels.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction

from attnlib.ops.dispatch import processors
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.launch.described import NotLaunched
from attnlib.ops.triton.launch.keys import kernel_key

__all__ = ["Survey", "can_survey", "survey_launches"]

_MOST_THREADS = 16
_SURVEYING = threading.Lock()


def can_survey(device: torch.device) -> bool:
    """Whether launches on a device can be surveyed: Triton compiles for it, in the way of the
    tested releases, and nobody observes its compilations."""
    runtime: Any = triton.knobs.runtime
    return (
        device.type == "cuda"
        and not chips.INTERPRETED
        and hasattr(JITFunction, "_do_compile")
        and runtime.jit_cache_hook is None
        and runtime.jit_post_compile_hook is None
    )


class _New(NamedTuple):
    """A kernel that is compiled.

    Attributes:
        kernels: Triton's table of the compiled kernels of a function on a device.
        key: in that table.
        placeholder: what has the place of the kernel until the survey ends.
        made: the compiled kernel.
    """

    kernels: dict[Any, Any]
    key: Any
    placeholder: NotLaunched
    made: Future[Any]


class Survey:
    """The launches of one thread.

    Attributes:
        new: kernels that this process had not used before.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.new: list[_New] = []
        self._pool, self._thread = pool, threading.get_ident()
        self._launched: dict[int, Any] = {}

    def take(self) -> frozenset[int]:
        """The kernels that were launched since the last call, by numbers that are theirs until the
        survey ends."""
        launched = frozenset(self._launched)
        self._launched.clear()
        return launched

    def is_own(self) -> bool:
        """Whether the calling thread is the one that is surveyed."""
        return threading.get_ident() == self._thread

    def note(self, kernel: Any) -> None:
        """Note a launch."""
        self._launched[id(kernel)] = kernel

    def compile(
        self,
        function: Any,
        key: Any,
        signature: Any,
        device: Any,
        constants: Any,
        options: Any,
        attributes: Any,
    ) -> NotLaunched:
        """Start to compile a kernel; arguments as of Triton's method. What takes its place until
        the end launches nothing."""
        kernels, _, target, backend, _ = function.device_caches[device]
        source = function.ASTSource(function, signature, constants, attributes)
        if not self.new:  # reads Triton's library once, and not in every thread
            kernel_key(source, backend, options)

        def make() -> Any:
            made = function.compile(source, target=target, options=options.__dict__)
            with torch.cuda.device(device) if torch.cuda.is_available() else nullcontext():
                made.run  # noqa: B018  # compiles its launcher, and loads it
            return made

        placeholder = kernels[key] = NotLaunched()
        self.new.append(_New(kernels, key, placeholder, self._pool.submit(make)))
        return placeholder

    def provide(self, kernel: Any) -> bool:
        """Put a kernel in its place early, for another thread, which found a placeholder there.

        Returns:
            Whether `kernel` is a placeholder of this survey.
        """
        for new in tuple(self.new):
            if new.placeholder is kernel:
                with suppress(CancelledError):  # then the place is free
                    new.kernels[new.key] = new.made.result()
                return True
        return False

    def free(self) -> None:
        """Free the places where Triton looks kernels up. Before Triton's methods are back, which
        would launch nothing for what is there."""
        for new in self.new:
            del new.kernels[new.key]

    def finish(self, is_complete: bool) -> None:
        """Put the kernels in their places; after an error, compile no more of them."""
        for new in self.new:
            if is_complete:
                new.kernels[new.key] = new.made.result()
            else:
                new.made.cancel()


@contextmanager
def survey_launches() -> Iterator[Survey | None]:
    """Inside, this thread's launches run nothing: other threads compile new kernels, or find them
    in Triton's cache, and load them. At the end all are there. Launches by other threads wait for
    their kernels. Use it where `can_survey`.

    Yields:
        The survey; None while there is another one, since both would replace Triton's methods: then
        launches are as usual.

    Raises:
        Exception: what Triton raises for a kernel.
    """
    if not _SURVEYING.acquire(blocking=False):
        yield None
        return
    try:
        with _replaced_methods() as survey:
            yield survey
    finally:
        _SURVEYING.release()


@contextmanager
def _replaced_methods() -> Iterator[Survey]:
    own_run, own_compile = JITFunction.run, JITFunction._do_compile
    with _threads() as pool:
        survey = Survey(pool)

        @functools.wraps(own_run)
        def run(self: Any, *arguments: Any, **options: Any) -> Any:
            if survey.is_own():
                # Kernels that are not new may read what new ones would have written.
                kernel = own_run(self, *arguments, **{**options, "warmup": True})
                survey.note(kernel)
                return kernel
            kernel = own_run(self, *arguments, **options)
            if isinstance(kernel, NotLaunched) and survey.provide(kernel):
                return own_run(self, *arguments, **options)
            return kernel

        def start(self: Any, *arguments: Any) -> Any:
            if survey.is_own():
                return survey.compile(self, *arguments[:6])
            return own_compile(self, *arguments)

        complete = False
        JITFunction.run, JITFunction._do_compile = run, start  # `launches_observed` sees it
        try:
            yield survey
            complete = True
        finally:
            survey.free()
            JITFunction.run, JITFunction._do_compile = own_run, own_compile
            survey.finish(complete)


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """As many threads as there are processors for this process."""
    # Triton changes the filters of warnings for a moment, which threads would leave changed.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(processors(), _MOST_THREADS)) as pool:
        yield pool
