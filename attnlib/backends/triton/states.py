"""State layers of the `triton` backend."""

from __future__ import annotations

from attnlib.backends.state_impl import StateOperations
from attnlib.ops.triton.states.short_convolution import short_convolution
from attnlib.ops.triton.states.state_step import state_step

__all__ = ["TritonStateImpl"]


class TritonStateImpl(StateOperations):
    """The kernels of `attnlib.ops.triton.states`, which read slots and positions on the device."""

    state_step = staticmethod(state_step)
    short_convolution = staticmethod(short_convolution)
