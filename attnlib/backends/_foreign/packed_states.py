"""State layers over functions that take the tokens of a batch in one row, and a state per request.

Such functions know neither slots nor positions nor padding: states are gathered before the call and
scattered after it, in the form `plain`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.backends.state_impl import StateImpl, StateInputs
from attnlib.cache.states import StateCache
from attnlib.capabilities import Sizes, StateCapabilities
from attnlib.metadata.states import StateMetadata
from attnlib.ops.states import StateBatch
from attnlib.ops.states.params import QK_NORM_EPS
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
        forms=("plain",),
        chunk_sizes=Sizes(16),
        max_rollback=0,
        batch_invariant=False,
        cudagraph=CudaGraphSupport.NEVER,  # the first layer of a batch reads its slots
        **fields,
    )


def normalized(heads: torch.Tensor) -> torch.Tensor:
    """Heads of length 1 (T4), computed in float32 and rounded to their dtype."""
    wide = heads.float()
    root = torch.rsqrt(wide.square().sum(-1, keepdim=True) + QK_NORM_EPS)
    return (wide * root).to(heads.dtype)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The N requests of a batch that have new tokens and a slot.

    Attributes:
        rows: their rows of the inputs, one after the other: a slice if these are the first ones,
            else int64.
        starts, starts_cpu: `[N + 1]` int64; where each request begins in `rows`.
        sources, slots: `[N]` int64; the slots to read and to write.
        fresh: `[N, 1, 1, 1]` bool; requests that begin with this step, whose slot is not read.
        ends: `[N, 1, 1, 1]` int32; tokens after the step.
        longest: the most new tokens of a request.
    """

    rows: torch.Tensor | slice
    starts: torch.Tensor
    starts_cpu: torch.Tensor
    sources: torch.Tensor
    slots: torch.Tensor
    fresh: torch.Tensor
    ends: torch.Tensor
    longest: int

    @classmethod
    def of(cls, batch: StateBatch) -> PackedBatch | None:
        """The requests of a batch, or None if there are none. Synchronizes."""
        requests, device = list(batch.requests()), batch.slots.device
        if not requests:
            return None

        def on_device(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        lengths = [r.end - r.computed for r in requests]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        rows: torch.Tensor | slice = slice(0, sum(lengths))
        if [r.start for r in requests] != starts[:-1].tolist():
            numbers = [torch.arange(r.rows.start, r.rows.stop) for r in requests]
            rows = torch.cat(numbers).to(device)
        begun = [r.source if r.computed else r.slot for r in requests]
        return cls(
            rows=rows,
            starts=starts.to(device),
            starts_cpu=starts,
            sources=on_device(begun),
            slots=on_device([r.slot for r in requests]),
            fresh=on_device([r.computed == 0 for r in requests], torch.bool).view(-1, 1, 1, 1),
            ends=on_device([r.end for r in requests], torch.int32).view(-1, 1, 1, 1),
            longest=max(lengths),
        )


class PackedStateImpl(StateImpl):
    """A layer on such a function, which `recur` calls."""

    @abstractmethod
    def recur(
        self, inputs: StateInputs, initial: torch.Tensor, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the recurrence of a batch.

        Args:
            inputs: of `rows` only, dense. `beta` is ones where the layer has none.
            initial: `[N, Hv, Dv, Dk]` float32; 0 for new requests.
            batch: the requests.

        Returns:
            `[rows, Hv, Dv]` without `skip`, and the states after the step like `initial`.
        """

    def step(
        self,
        inputs: StateInputs,
        cache: StateCache,
        metadata: StateMetadata,
        output: torch.Tensor,
    ) -> None:
        """See `StateImpl.step`. Synchronizes; a plan does so once per batch."""
        self._run(PackedBatch.of(metadata.batch), inputs, cache, output)

    def plan_step(
        self,
        signature: Hashable,
        inputs: StateInputs,
        cache: StateCache,
        metadata: StateMetadata,
        output: torch.Tensor,
    ) -> Callable[[StateImpl, StateInputs, StateCache, torch.Tensor], None]:
        """The requests of the batch, for all layers of the group."""
        batch = PackedBatch.of(metadata.batch)

        def run(impl: Any, inputs: StateInputs, cache: StateCache, output: torch.Tensor) -> None:
            impl._run(batch, inputs, cache, output)

        return run

    @torch.no_grad()
    def _run(
        self,
        batch: PackedBatch | None,
        inputs: StateInputs,
        cache: StateCache,
        output: torch.Tensor,
    ) -> None:
        output.zero_()
        if batch is None:
            return
        state, positions = cache.tensors.state, cache.tensors.positions
        assert state is not None and positions is not None  # the layer has a recurrence
        packed = self._packed(inputs, batch)
        initial = state[batch.sources, 0].float().masked_fill(batch.fresh, 0.0)
        out, final = self.recur(packed, initial, batch)
        if self.owner.skip is not None:
            out = out + self.owner.skip[:, None] * packed.value
        output[batch.rows] = out.to(output.dtype)
        state[batch.slots, 0] = final.to(state.dtype)
        positions[batch.slots] = batch.ends

    def _packed(self, inputs: StateInputs, batch: PackedBatch) -> StateInputs:
        query, key, value = (x[batch.rows].contiguous() for x in inputs[:3])
        decay = inputs.log_decay if self.spec.decay == "constant" else inputs.log_decay[batch.rows]
        beta = inputs.beta
        if beta is None:
            beta = torch.ones(value.shape[:2], device=value.device)
        else:
            beta = beta[batch.rows].contiguous()
        return StateInputs(query, key, value, decay.contiguous(), beta)

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
        convolution: Callable[..., None]
        if x.is_cuda:
            from attnlib.ops.triton.states.short_convolution import short_convolution

            convolution = short_convolution
        else:
            from attnlib.ops.torch.states.short_convolution import short_convolution as on_host

            convolution = on_host
        weights, tensors = (owner.conv_weight, owner.conv_bias), cache.tensors
        activation = self.spec.conv_activation
        convolution(x, *weights, tensors, metadata.batch, activation=activation, out=output)
