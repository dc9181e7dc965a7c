"""State layers over functions that take the tokens of a batch in one row, and a state per request.

Such functions know neither slots nor positions nor padding, and return the last state of a
sequence: states are gathered before the call and scattered after it. In the form `snapshots`, each
state that a slot keeps is that behind a sequence of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from attnlib.backends._foreign.packed_batch import PackedBatch, PackedStep
from attnlib.backends.state_impl import StateInputs, StateOperations
from attnlib.cache.states import StateCache
from attnlib.capabilities import Sizes, StateCapabilities
from attnlib.metadata.states import StateMetadata
from attnlib.ops.dispatch import operation
from attnlib.ops.states.inputs import QK_NORM_EPS
from attnlib.spec import CudaGraphSupport

__all__ = ["PackedBatch", "PackedStateImpl", "normalized", "packed_capabilities"]


def packed_capabilities(**fields: Any) -> StateCapabilities:
    """Declare such functions. Convolutions run on attnlib's own kernel.

    Args:
        fields: of `StateCapabilities`; what a function of this kind may support differently.
    """
    return StateCapabilities(
        devices=("cuda",),
        state_dtypes=(torch.float32, torch.bfloat16),
        group_sizes=Sizes(1),
        beta=True,
        skip=True,
        qk_norm=True,
        conv_widths=Sizes(2),
        conv_activations=("silu", "none"),
        conv_bias=True,
        forms=("plain", "snapshots"),
        chunk_sizes=Sizes(16),
        max_rollback=16,
        batch_invariant=False,
        cudagraph=CudaGraphSupport.NEVER,  # the first layer of a batch reads its slots
        **fields,
    )


def normalized(heads: Tensor) -> Tensor:
    """Heads of length 1 (T4), computed in float32 and rounded to their dtype."""
    wide = heads.float()
    root = torch.rsqrt(wide.square().sum(-1, keepdim=True) + QK_NORM_EPS)
    return (wide * root).to(heads.dtype)


class PackedStateImpl(StateOperations):
    """A layer on such a function, which `recur` calls."""

    @staticmethod
    def short_convolution(x: Tensor, *arguments: Any, out: Tensor) -> None:
        """attnlib's own."""
        operation("states.short_convolution", "short_convolution", x)(x, *arguments, out=out)

    @abstractmethod
    def recur(
        self, inputs: StateInputs, initial: Tensor, batch: PackedBatch
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence of the sequences of a call.

        Args:
            inputs: of `rows` only, dense. `beta` is ones where the layer has none.
            initial: `[N, Hv, Dv, Dk]` float32; 0 for new requests.
            batch: the sequences.

        Returns:
            `[rows, Hv, Dv]` without `skip`, and the states behind each sequence like `initial`.
        """

    def step(
        self, inputs: StateInputs, cache: StateCache, metadata: StateMetadata, output: Tensor
    ) -> None:
        """See `StateImpl.step`. Synchronizes, once per batch and memory of slots."""
        steps = metadata.derived
        if cache.signature not in steps:
            steps[cache.signature] = PackedStep.of(metadata.batch, cache.tensors)
        self._run(steps[cache.signature], inputs, cache, output)

    @torch.no_grad()
    def _run(
        self, step: PackedStep | None, inputs: StateInputs, cache: StateCache, output: Tensor
    ) -> None:
        output.zero_()
        if step is None:
            return
        stored, positions = cache.tensors.state, cache.tensors.positions
        states = stored[step.sources, step.numbers].float().masked_fill(step.fresh, 0.0)
        if len(step.copied):
            place = step.slots[step.copied], step.numbers[step.copied]
            stored[place] = states[step.copied].to(stored.dtype)
        for call in step.calls:
            packed = self._packed(inputs, call)
            out, final = self.recur(packed, states[call.requests], call)
            if self.owner.skip is not None:
                out = out + self.owner.skip[:, None] * packed.value
            rows, places = call.written
            output[rows] = out[places].to(output.dtype)
            stored[call.slots, call.numbers] = final.to(stored.dtype)
            if call is not step.calls[-1]:
                states[call.requests] = final
        positions[step.slots] = step.positions

    def _packed(self, inputs: StateInputs, batch: PackedBatch) -> StateInputs:
        packed = inputs.each(lambda x: x[batch.rows].contiguous())
        beta, value = packed.beta, packed.value
        if beta is None:
            beta = torch.ones(value.shape[:2], dtype=torch.float32, device=value.device)
        return packed._replace(log_decay=packed.log_decay.contiguous(), beta=beta)
