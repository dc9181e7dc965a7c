"""One step of a recurrence over a batch, in one launch or three (`kernels/state_step.py`, and
`hopper/kernels/state_long.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.states.batch import StateBatch
from attnlib.ops.states.inputs import RecurrenceParams, StateInputs
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.hopper.kernels.state_blocks import SPAN
from attnlib.ops.triton.hopper.kernels.state_channel_chunks import channel_matrices_kernel
from attnlib.ops.triton.hopper.kernels.state_decode import copied_decode_kernel
from attnlib.ops.triton.hopper.kernels.state_long import (
    factor_size,
    long_matrices_kernel,
    plane_size,
)
from attnlib.ops.triton.hopper.kernels.state_serial import serial_step_kernel
from attnlib.ops.triton.hopper.tensor_support import unsupported_strides
from attnlib.ops.triton.kernels.state_prefill import (
    prepared_columns,
    state_matrices_kernel,
    state_tail_kernel,
)
from attnlib.ops.triton.kernels.state_step import state_step_kernel
from attnlib.ops.triton.launch.bound import ALIGNMENT
from attnlib.ops.triton.states import config as configs
from attnlib.ops.triton.states.launch import KernelLaunch

__all__ = ["PreparedStep", "state_step"]


def state_step(
    inputs: StateInputs,
    slots: StateTensors,
    batch: StateBatch,
    params: RecurrenceParams,
    *,
    out: Tensor,
) -> None:
    """See `attnlib.ops.torch.states.state_step`. Slots and positions are not checked; slots that
    cannot continue give undefined outputs.

    Raises:
        ContractError: slots of another form than `tail`, heads of more than 256, dtypes that the
            kernels do not take, or heads that are not dense.
    """
    if out.numel():
        step = PreparedStep(inputs, slots, batch, params, out)
        step.run(inputs, slots, batch, params.skip, out)
    else:
        _check(inputs, slots, out)


class PreparedStep:
    """The launches of `state_step` over one batch, for tensors and slots that differ in addresses
    and values only. Arguments and errors as of `state_step`."""

    def __init__(
        self,
        inputs: StateInputs,
        slots: StateTensors,
        batch: StateBatch,
        params: RecurrenceParams,
        out: Tensor,
    ) -> None:
        _check(inputs, slots, out)
        layout, limits, rows = slots.layout, limits_of(inputs.value), out.shape[0]
        self._params = replace(params, skip=None)  # layers of a group have their own
        num_reqs, scale = batch.num_reqs, float(params.scale)
        is_long = batch.max_query_len > layout.max_rollback + 1
        chunk = _long_chunk(inputs, slots, batch, params)
        # Rows are copied in units of 16 bytes.
        rows_of = dict(query=inputs.query, key=inputs.key, value=inputs.value)
        self._is_moved = chunk > 0 and bool(unsupported_strides(**rows_of))
        self._has_long_chunks, few, few_warps = chunk > 0, 0, 0
        if chunk:
            # Steps of at most D + 1 tokens begin in the chunk of the first one that is replaced.
            is_short = not is_long and 2 * layout.max_rollback <= chunk
            few, is_long = is_short * (1 + (layout.max_rollback > 0)), True
            tile = state_tiles.long_tile(layout, is_short)
        else:
            tile = configs.step_tile(layout, params, limits, num_reqs, is_long)
        queries = configs.most_queries(layout, tile, batch.max_query_len)
        recurrence = configs.Recurrence.on_chip(params, limits)
        given = layout, recurrence, _strides(inputs, slots, out), tile
        config = configs.state_config(*given, is_long, chunk, queries, few)
        options, heads, c = tile.options(limits.is_amd), config.HV, config.C
        kernel: Any = copied_decode_kernel if tile.copies else state_step_kernel
        matrices: Any = state_matrices_kernel
        of_matrices: tuple[float, ...] = (num_reqs,)
        of_step: tuple[float, ...] = (scale, num_reqs, rows)
        chunks, is_channel = rows // c + num_reqs * config.EXTRA, layout.decay == "channel"
        self._memory: list[tuple[tuple[int, ...], torch.dtype]] = []
        if is_long:
            columns = prepared_columns(c, config.PART, config.PARTS, is_channel)
            self._memory = [((chunks, heads, c, columns), torch.float32)]
        if chunk:
            kernel, matrices, few_warps = serial_step_kernel, long_matrices_kernel, 1 + is_channel
            if is_channel and not params.is_invariant:
                matrices, few_warps = channel_matrices_kernel, config.PART // SPAN.value
            of_matrices, of_step = (scale, num_reqs), (num_reqs, rows)
            planes = plane_size(c, config.PART, config.DELTA, is_channel)
            self._memory = [
                ((chunks, heads, planes), torch.bfloat16),
                ((chunks, heads, factor_size(c, config.PART, is_channel)), torch.float32),
            ]
        grid = (num_reqs + 1, heads * config.BLOCKS)
        self._step = KernelLaunch(kernel, config, grid, of_step, **options)
        if is_long:
            warps, unit = options["num_warps"], config._replace(C=config.UNIT)
            of_chunks = (config, (chunks, heads), of_matrices)
            self._matrices = KernelLaunch(matrices, *of_chunks, num_warps=few_warps or warps)
            self._tails = KernelLaunch(state_tail_kernel, unit, (num_reqs, heads), num_warps=warps)

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
        addresses = query.data_ptr() | key.data_ptr() | value.data_ptr()
        if self._is_moved or (self._has_long_chunks and addresses & ALIGNMENT):
            query, key, value = (x.clone(memory_format=torch.contiguous_format) for x in inputs[:3])
            moved = StateInputs(query, key, value, log_decay, beta)
            state_step(moved, slots, batch, replace(self._params, skip=skip), out=out)
            return
        # Tensors that the kernels do not read stand for absent ones.
        absent, (state, *stored), where = log_decay, slots.for_kernels, batch.tensors
        gates, memory = (log_decay, absent if beta is None else beta), [absent]
        skip = absent if skip is None else skip
        if self._memory:
            device, (positions, tail_key, _, *tails) = query.device, stored
            memory = [torch.empty(size, dtype=kind, device=device) for size, kind in self._memory]
            given = (query, key, *gates, positions, tail_key, *tails)
            self._matrices.run(*given, *where, *memory)
        if self._has_long_chunks:  # whose gates are in the factors
            self._step.run(query, key, value, skip, out, state, *stored[:3], *where, *memory)
        else:
            given = (query, key, value, *gates, skip, out, state, *stored)
            self._step.run(*given, *where, *memory)
        if self._memory:
            self._tails.run(key, value, *gates, *stored, *where)


def _long_chunk(
    inputs: StateInputs, slots: StateTensors, batch: StateBatch, params: RecurrenceParams
) -> int:
    """Tokens that the kernels of long steps compute at a time; 0 if others run the step."""
    layout, capability = slots.layout, limits_of(inputs.value).capability
    if not batch.num_reqs or len({layout.dtype, *(x.dtype for x in inputs[:3])}) > 1:
        return 0
    return state_tiles.long_chunk(layout, capability, params.is_invariant, batch.max_query_len)


def _check(inputs: StateInputs, slots: StateTensors, out: Tensor) -> None:
    query, key, value, log_decay, beta = inputs
    configs.check_slots(slots.layout)
    configs.check_dense(query=query, key=key, value=value, out=out)
    if log_decay.dtype != torch.float32 or (beta is not None and beta.dtype != torch.float32):
        raise ContractError("log_decay and beta must be float32", rule="T5")
    if slots.layout.decay == "channel":
        configs.check_dense(log_decay=log_decay)


def _strides(inputs: StateInputs, slots: StateTensors, out: Tensor) -> tuple[int, ...]:
    """The strides in the order of `StateConfig`."""
    _, _, _, log_decay, beta = inputs
    rows = [stride for tensor in (*inputs[:3], out) for stride in tensor.stride()[:2]]
    is_constant = slots.layout.decay == "constant"
    decay = (0, log_decay.stride(0)) if is_constant else log_decay.stride()[:2]
    gates = (*decay, *((0, 0) if beta is None else beta.stride()))
    return (*rows, *gates, *configs.slot_strides(slots))
