"""State layers of the `torch` backend."""

from __future__ import annotations

from attnlib.backends.state_impl import StateOperations
from attnlib.ops.torch.states.short_convolution import short_convolution
from attnlib.ops.torch.states.state_step import state_step

__all__ = ["TorchStateImpl"]


class TorchStateImpl(StateOperations):
    """The operations of `attnlib.ops.torch.states`, which check slots and positions always."""

    checks_positions = True
    state_step = staticmethod(state_step)
    short_convolution = staticmethod(short_convolution)
