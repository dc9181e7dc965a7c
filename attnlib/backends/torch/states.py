"""State layers of the `torch` backend."""

from __future__ import annotations

import torch

from attnlib.backends.base import StateImpl
from attnlib.backends.state_impl import StateInputs
from attnlib.cache.states import StateCache
from attnlib.metadata.states import StateMetadata
from attnlib.ops.torch.states.short_convolution import short_convolution
from attnlib.ops.torch.states.state_step import state_step

__all__ = ["TorchStateImpl"]


class TorchStateImpl(StateImpl):
    """The operations of `attnlib.ops.torch.states`, which check slots and positions always."""

    def step(
        self,
        inputs: StateInputs,
        cache: StateCache,
        metadata: StateMetadata,
        output: torch.Tensor,
    ) -> None:
        """See `StateImpl.step`."""
        state_step(*inputs, cache.tensors, metadata.batch, self.params, out=output)

    def convolve(
        self,
        x: torch.Tensor,
        cache: StateCache,
        metadata: StateMetadata,
        output: torch.Tensor,
    ) -> None:
        """See `StateImpl.convolve`."""
        owner = self.owner
        assert owner.conv_weight is not None  # the layer checks it
        short_convolution(
            x,
            owner.conv_weight,
            owner.conv_bias,
            cache.tensors,
            metadata.batch,
            activation=self.spec.conv_activation,
            out=output,
        )
