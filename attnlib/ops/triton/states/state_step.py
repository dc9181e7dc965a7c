"""One step of a recurrence over a batch, in one launch or three (`kernels/state_step.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.states.batch import StateBatch
from attnlib.ops.states.params import RecurrenceParams
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.heuristics.state_tiles import state_tile
from attnlib.ops.triton.kernels.state_prefill import state_matrices_kernel, state_tail_kernel
from attnlib.ops.triton.kernels.state_step import state_step_kernel
from attnlib.ops.triton.states.config import (
    Recurrence,
    check_dense,
    check_slots,
    is_pipelined,
    slot_strides,
    state_config,
)
from attnlib.ops.triton.states.launch import KernelLaunch, batch_tensors

__all__ = ["PreparedStep", "state_step"]


def state_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
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
        step = PreparedStep(query, key, value, log_decay, beta, slots, batch, params, out=out)
        step.run(query, key, value, log_decay, beta, slots, params.skip, out)
    else:
        _check(query, key, value, log_decay, beta, slots, out)


class PreparedStep:
    """The launches of `state_step` over one batch, for tensors that differ in addresses and values
    only. Arguments and errors as of `state_step`."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        slots: StateTensors,
        batch: StateBatch,
        params: RecurrenceParams,
        *,
        out: Tensor,
    ) -> None:
        _check(query, key, value, log_decay, beta, slots, out)
        limits, num_reqs = limits_of(value), batch.num_reqs
        is_long = batch.max_query_len > slots.layout.max_rollback + 1
        strides = _strides(query, key, value, log_decay, beta, slots, out)
        recurrence = Recurrence.on_chip(params, limits)
        config = state_config(slots.layout, recurrence, strides, is_long)
        # Those of AMD have 64 threads.
        warps = 4 if limits.is_amd else state_tile(config.DK, config.DV).num_warps
        chunks = out.shape[0] // config.C + num_reqs * config.EXTRA if is_long else 0
        self._where, self._scale = batch_tensors(batch), params.scale
        self._numbers = (num_reqs, out.shape[0])
        self._workspace = chunks * config.HV * 2 * config.C * config.C
        self._step = KernelLaunch(
            state_step_kernel,
            config,
            (num_reqs + 1, config.HV * config.BLOCKS),
            num_warps=warps,
            num_stages=2 if is_long and warps == 8 and is_pipelined(slots.layout) else 1,
        )
        self._matrices, self._tails = (
            KernelLaunch(kernel, config, (programs, config.HV), num_warps=warps)
            for kernel, programs in ((state_matrices_kernel, chunks), (state_tail_kernel, num_reqs))
        )

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        slots: StateTensors,
        skip: Tensor | None,
        out: Tensor,
    ) -> None:
        """Launch on the current stream."""
        # Tensors that the kernels do not read stand for absent ones.
        gates = (log_decay, log_decay if beta is None else beta)
        assert slots.positions is not None and slots.state is not None  # `_check`: they are tails
        positions, (tail_key, *tails) = (
            slots.positions,
            (
                log_decay if field is None else field
                for field in (
                    slots.tail_key,
                    slots.tail_value,
                    slots.tail_log_decay,
                    slots.tail_beta,
                )
            ),
        )
        stored = (positions, tail_key, *tails, *self._where)
        workspace = log_decay
        if self._workspace:
            workspace = torch.empty(self._workspace, dtype=torch.float32, device=query.device)
            tensors = (query, key, *gates, positions, tail_key, *tails[1:], *self._where, workspace)
            self._matrices.run(tensors, self._numbers[:1])
        first = (query, key, value, *gates, log_decay if skip is None else skip, out, slots.state)
        self._step.run((*first, *stored, workspace), (self._scale, *self._numbers))
        if self._workspace:
            self._tails.run((key, value, *gates, *stored), ())


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    slots: StateTensors,
    out: Tensor,
) -> None:
    check_slots(slots.layout)
    check_dense(query=query, key=key, value=value, out=out)
    if log_decay.dtype != torch.float32 or (beta is not None and beta.dtype != torch.float32):
        raise ContractError("log_decay and beta must be float32", rule="T5")
    if slots.layout.decay == "channel":
        check_dense(log_decay=log_decay)


def _strides(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    slots: StateTensors,
    out: Tensor,
) -> tuple[int, ...]:
    """The strides in the order of `StateConfig`."""
    rows = (stride for tensor in (query, key, value, out) for stride in tensor.stride()[:2])
    is_constant = slots.layout.decay == "constant"
    decay = (0, log_decay.stride(0)) if is_constant else log_decay.stride()[:2]
    return (*rows, *decay, *((0, 0) if beta is None else beta.stride()), *slot_strides(slots))
