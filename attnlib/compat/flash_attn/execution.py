"""Where a call runs, and what selects its backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attnlib.selection.current import selection_state

__all__ = ["Execution", "execution", "same_execution"]


class Execution(NamedTuple):
    """Where a call runs and what selects its backend. Calls that differ in it share no buffers.

    Attributes:
        stream: the current stream, 0 on a CPU.
        capturing: whether a CUDA graph is being captured.
        selection: what `use_backend` asks for, and the state of the registry.
    """

    stream: int
    capturing: bool
    selection: tuple[Any, ...]


_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def execution(index: int) -> Execution:
    """The `Execution` of a call on CUDA device `index`, or on the CPU (-1)."""
    if index < 0 or _raw_stream is None:
        return Execution(0, False, selection_state())
    return Execution(_raw_stream(index), _is_capturing(), selection_state())


def same_execution(where: Execution, index: int) -> bool:
    """Whether `execution(index)` equals `where`."""
    if index < 0 or _raw_stream is None:
        return selection_state() == where.selection
    return (
        _raw_stream(index) == where.stream
        and _is_capturing() == where.capturing
        and selection_state() == where.selection
    )
