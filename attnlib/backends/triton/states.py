"""State layers of the `triton` backend."""

from __future__ import annotations

from torch import Tensor

from attnlib.backends.state_impl import StateInputs, StateOperations, StepPlan
from attnlib.cache.states import StateCache
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states.step_form import FusedInputs
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.heuristics.state_tiles import long_chunk
from attnlib.ops.triton.states.fused_step import PreparedFusedStep
from attnlib.ops.triton.states.short_convolution import PreparedConvolution, short_convolution
from attnlib.ops.triton.states.state_step import PreparedStep, state_step
from attnlib.ops.triton.states.step_parts import gated_norm, state_gates

__all__ = ["TritonStateImpl"]


class TritonStateImpl(StateOperations):
    """The kernels of `attnlib.ops.triton.states`, which read slots and positions on the device."""

    state_step = staticmethod(state_step)
    short_convolution = staticmethod(short_convolution)
    state_gates = staticmethod(state_gates)
    gated_norm = staticmethod(gated_norm)

    def plan_step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: Tensor
    ) -> StepPlan:
        """The launches of the batch, for all layers of the group."""
        if not output.numel():
            return type(self).step
        prepared = PreparedStep(inputs, cache.tensors, metadata.batch, self.params, output)
        return lambda impl, inputs, cache, metadata, output: prepared.run(
            inputs, cache.tensors, metadata.batch, impl.owner.skip, output
        )

    def plan_convolution(
        self, x: Tensor, cache: StateCache, metadata: StateMetadata, output: Tensor
    ) -> StepPlan:
        """The same for the convolution."""
        prepared = PreparedConvolution(x, self.taps, cache.tensors, metadata.batch, output)
        return lambda impl, x, cache, metadata, output: prepared.run(
            x, impl.taps, cache.tensors, metadata.batch, output
        )

    def plan_fused_step(
        self, inputs: FusedInputs, cache: StateCache, metadata: StateMetadata, output: Tensor
    ) -> StepPlan | None:
        """One launch for decodes and verification, if other steps of an invariant layer have the
        bits of its kernel (T18)."""
        batch = metadata.batch
        if not output.numel() or batch.max_query_len > self.spec.max_rollback + 1:
            return None
        capability = limits_of(output).capability
        if self.spec.batch_invariant and long_chunk(cache.tensors.layout, capability, True):
            return None
        given = inputs, self.taps, cache.tensors, batch, self.params
        prepared = PreparedFusedStep(*given, output)
        return lambda impl, inputs, cache, metadata, output: prepared.run(
            inputs, impl.taps, cache.tensors, metadata.batch, impl.owner.skip, output
        )
