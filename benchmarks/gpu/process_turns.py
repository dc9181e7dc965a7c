"""Runs of compiled models that take turns, each in a process of its own.

CUDA graphs of torch.compile that are recorded in one process share their memory, so that models
cannot take turns there.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

__all__ = ["ProcessRun"]


class ProcessRun:
    """A measurement in another process, which makes it at once.

    Args:
        make: a function of a module; returns an object with the method `repeat`.
        arguments: of `make`.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, arguments))
        self._process.start()

    def ready(self, seconds: float | None = None) -> None:
        """Wait until the object is made.

        Args:
            seconds: how long; None for as long as it takes.

        Raises:
            RuntimeError: the process has failed, or is not ready in time.
        """
        if not self._connection.poll(seconds):
            raise RuntimeError(f"not ready after {seconds:.0f} s")
        self._answer()

    def repeat(self) -> None:
        """Call its method `repeat`."""
        self._connection.send(True)
        self._answer()

    def close(self) -> dict[str, Any]:
        """The values of the object that can be sent, by name; ends the process."""
        self._connection.send(False)
        found: dict[str, Any] = self._answer()
        self._connection.send(False)  # its tensors are received
        self._process.join()
        return found

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.terminate()
        self._process.join()

    def _answer(self) -> Any:
        try:
            done, value = self._connection.recv()
        except EOFError:
            done, value = False, "the process ended"
        if not done:
            raise RuntimeError(value)
        return value


def _serve(connection: Any, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        made = make(*arguments)
        connection.send((True, None))
        while connection.recv():
            made.repeat()
            connection.send((True, None))
        values = {name: value for name, value in vars(made).items() if not callable(value)}
        connection.send((True, values))
        connection.recv()
    except Exception as error:
        connection.send((False, f"{type(error).__name__}: {error}"[:300]))
