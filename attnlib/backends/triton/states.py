"""State layers of the `triton` backend."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from attnlib.backends.state_impl import StateImpl, StateInputs, StateOperations
from attnlib.cache.states import StateCache
from attnlib.metadata.states import StateMetadata
from attnlib.ops.triton.states.short_convolution import short_convolution
from attnlib.ops.triton.states.state_step import PreparedStep, state_step

__all__ = ["TritonStateImpl"]


class TritonStateImpl(StateOperations):
    """The kernels of `attnlib.ops.triton.states`, which read slots and positions on the device."""

    state_step = staticmethod(state_step)
    short_convolution = staticmethod(short_convolution)

    def plan_step(
        self,
        signature: Hashable,
        inputs: StateInputs,
        cache: StateCache,
        metadata: StateMetadata,
        output: torch.Tensor,
    ) -> Callable[[StateImpl, StateInputs, StateCache, torch.Tensor], None] | None:
        """The launches of the batch, for all layers of the group."""
        if not output.numel():
            return None
        tensors, batch = cache.tensors, metadata.batch
        prepared = PreparedStep(*inputs, tensors, batch, self.params, out=output)

        def run(
            impl: StateImpl, inputs: StateInputs, cache: StateCache, output: torch.Tensor
        ) -> None:
            prepared.run(*inputs, cache.tensors, impl.owner.skip, output)

        return run
