"""A step of many tokens in larger chunks than those of slots (`hopper/kernels/state_long.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.states.batch import StateBatch
from attnlib.ops.states.inputs import RecurrenceParams, StateInputs
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.heuristics.device import INTERPRETED, DeviceLimits, limits_of
from attnlib.ops.triton.hopper.kernels.state_long import (
    FACTORS,
    TERMS,
    long_matrices_kernel,
    long_step_kernel,
)
from attnlib.ops.triton.kernels.state_prefill import state_tail_kernel
from attnlib.ops.triton.states.config import Recurrence, state_config
from attnlib.ops.triton.states.launch import KernelLaunch

__all__ = ["PreparedLongStep", "takes_long_chunks"]


def takes_long_chunks(
    inputs: StateInputs,
    slots: StateTensors,
    batch: StateBatch,
    params: RecurrenceParams,
    limits: DeviceLimits,
) -> bool:
    """Whether `PreparedLongStep` computes a step."""
    dtypes = {inputs.query.dtype, inputs.key.dtype, inputs.value.dtype, slots.layout.dtype}
    # Two stages of the loop need the shared memory of Hopper; the interpreter tests the kernels.
    has_memory = limits.capability[0] == 9 or INTERPRETED
    is_free = has_memory and not params.is_invariant and len(dtypes) == 1
    return is_free and state_tiles.uses_long_chunks(slots.layout, batch.max_query_len)


class PreparedLongStep:
    """The launches of a step over one batch; arguments as of `PreparedStep`.

    Args:
        strides: of `StateConfig`.
        rows: of the outputs.
    """

    def __init__(
        self,
        inputs: StateInputs,
        slots: StateTensors,
        batch: StateBatch,
        params: RecurrenceParams,
        strides: tuple[int, ...],
        rows: int,
    ) -> None:
        layout, limits, num_reqs = slots.layout, limits_of(inputs.value), batch.num_reqs
        recurrence = Recurrence.on_chip(params, limits)
        sizes = layout.key_size, layout.value_size, layout.chunk_size
        tile = state_tiles.state_tile(*sizes, "long prefill")
        chunk, heads = state_tiles.LONG_CHUNK, layout.num_heads
        config = state_config(layout, recurrence, strides, tile, True, chunk)
        options, chunks = tile.options(limits.is_amd), rows // chunk + num_reqs * config.EXTRA
        matrices = 2 if config.DELTA else 1
        self._planes = (chunks, heads, matrices, TERMS.value, chunk, chunk)
        self._factors = (chunks, heads, FACTORS.value, chunk)
        self._matrices = KernelLaunch(
            long_matrices_kernel, config, (chunks, heads), (float(params.scale), num_reqs)
        )
        self._step = KernelLaunch(
            long_step_kernel,
            config,
            (num_reqs + 1, heads * config.BLOCKS),
            (num_reqs, rows),
            **options,
        )
        unit = config._replace(C=config.UNIT)
        self._tails = KernelLaunch(state_tail_kernel, unit, (num_reqs, heads))

    def run(
        self,
        inputs: StateInputs,
        slots: StateTensors,
        batch: StateBatch,
        skip: Tensor | None,
        out: Tensor,
    ) -> None:
        """Launch on the current stream."""
        query, key, value, log_decay, beta = inputs
        device, where, absent = query.device, batch.tensors, log_decay
        state, positions, tail_key, tail_value, *tails = slots.for_kernels
        gates = log_decay, absent if beta is None else beta
        planes = torch.empty(self._planes, dtype=torch.bfloat16, device=device)
        factors = torch.empty(self._factors, dtype=torch.float32, device=device)
        memory = planes, factors
        self._matrices.run(query, key, *gates, positions, tail_key, *tails, *where, *memory)
        stored = positions, tail_key, tail_value
        skip = absent if skip is None else skip
        self._step.run(query, key, value, skip, out, state, *stored, *where, *memory)
        self._tails.run(key, value, *gates, *stored, *tails, *where)
