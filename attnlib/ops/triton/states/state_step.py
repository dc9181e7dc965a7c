"""One step of a recurrence over a batch, in one launch or three (`kernels/state_step.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.states.batch import StateBatch
from attnlib.ops.states.inputs import RecurrenceParams, StateInputs
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.hopper.kernels.state_decode import copied_decode_kernel
from attnlib.ops.triton.kernels.state_prefill import state_matrices_kernel, state_tail_kernel
from attnlib.ops.triton.kernels.state_step import state_step_kernel
from attnlib.ops.triton.states.config import (
    Recurrence,
    check_dense,
    check_slots,
    slot_strides,
    state_config,
    step_tile,
)
from attnlib.ops.triton.states.launch import KernelLaunch
from attnlib.ops.triton.states.long_step import PreparedLongStep, takes_long_chunks

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
        step = PreparedStep(inputs, slots, batch, params, out=out)
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
        *,
        out: Tensor,
    ) -> None:
        _check(inputs, slots, out)
        limits, num_reqs = limits_of(inputs.value), batch.num_reqs
        is_long = batch.max_query_len > slots.layout.max_rollback + 1
        strides = _strides(inputs, slots, out)
        self._long: PreparedLongStep | None = None
        if is_long and takes_long_chunks(inputs, slots, batch, params, limits):
            self._long = PreparedLongStep(inputs, slots, batch, params, strides, out.shape[0])
            return
        recurrence = Recurrence.on_chip(params, limits)
        tile = step_tile(slots.layout, params, limits, num_reqs, is_long, not is_long)
        config = state_config(slots.layout, recurrence, strides, tile, is_long)
        options = tile.options(limits.is_amd)
        chunks = out.shape[0] // config.C + num_reqs * config.EXTRA if is_long else 0
        self._workspace = chunks * config.HV * 2 * config.C * config.C
        self._step = KernelLaunch(
            copied_decode_kernel if tile.copies else state_step_kernel,
            config,
            (num_reqs + 1, config.HV * config.BLOCKS),
            (float(params.scale), num_reqs, out.shape[0]),
            **options,
        )
        if is_long:
            grids = (chunks, config.HV), (num_reqs, config.HV)
            warps = options["num_warps"]
            self._matrices = KernelLaunch(
                state_matrices_kernel, config, grids[0], (num_reqs,), num_warps=warps
            )
            self._tails = KernelLaunch(state_tail_kernel, config, grids[1], num_warps=warps)

    def run(
        self,
        inputs: StateInputs,
        slots: StateTensors,
        batch: StateBatch,
        skip: Tensor | None,
        out: Tensor,
    ) -> None:
        """Launch on the current stream."""
        if self._long is not None:
            self._long.run(inputs, slots, batch, skip, out)
            return
        query, key, value, log_decay, beta = inputs
        # Tensors that the kernels do not read stand for absent ones.
        absent, (state, *stored), where = log_decay, slots.for_kernels, batch.tensors
        gates = (log_decay, absent if beta is None else beta)
        workspace = absent
        if self._workspace:
            workspace = torch.empty(self._workspace, dtype=torch.float32, device=query.device)
            positions, tail_key, _, *tails = stored
            given = (query, key, *gates, positions, tail_key, *tails)
            self._matrices.run(*given, *where, workspace)
        skip = absent if skip is None else skip
        self._step.run(query, key, value, *gates, skip, out, state, *stored, *where, workspace)
        if self._workspace:
            self._tails.run(key, value, *gates, *stored, *where)


def _check(inputs: StateInputs, slots: StateTensors, out: Tensor) -> None:
    query, key, value, log_decay, beta = inputs
    check_slots(slots.layout)
    check_dense(query=query, key=key, value=value, out=out)
    if log_decay.dtype != torch.float32 or (beta is not None and beta.dtype != torch.float32):
        raise ContractError("log_decay and beta must be float32", rule="T5")
    if slots.layout.decay == "channel":
        check_dense(log_decay=log_decay)


def _strides(inputs: StateInputs, slots: StateTensors, out: Tensor) -> tuple[int, ...]:
    """The strides in the order of `StateConfig`."""
    _, _, _, log_decay, beta = inputs
    rows = [stride for tensor in (*inputs[:3], out) for stride in tensor.stride()[:2]]
    is_constant = slots.layout.decay == "constant"
    decay = (0, log_decay.stride(0)) if is_constant else log_decay.stride()[:2]
    return (*rows, *decay, *((0, 0) if beta is None else beta.stride()), *slot_strides(slots))
