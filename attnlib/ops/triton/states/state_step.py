"""One step of a recurrence over a batch, in one launch or three (`kernels/state_step.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.states.batch import StateBatch
from attnlib.ops.states.params import RecurrenceParams
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.heuristics.state_tiles import state_tile
from attnlib.ops.triton.kernels.state_arguments import StateConfig
from attnlib.ops.triton.kernels.state_prefill import state_matrices_kernel, state_tail_kernel
from attnlib.ops.triton.kernels.state_step import state_step_kernel
from attnlib.ops.triton.states.config import (
    Recurrence,
    check_dense,
    check_slots,
    slot_strides,
    state_config,
)
from attnlib.ops.triton.states.launch import batch_tensors, run_kernel

__all__ = ["state_step"]


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
    _check(query, key, value, log_decay, beta, slots, out)
    if not out.numel():
        return
    is_long = batch.max_query_len > slots.layout.max_rollback + 1
    strides = _strides(query, key, value, log_decay, beta, slots, out)
    recurrence = Recurrence.on_chip(params, limits_of(value))
    config = state_config(slots.layout, recurrence, strides, is_long)
    # Tensors that the kernels do not read stand for absent ones.
    beta = log_decay if beta is None else beta
    tails = (slots.tail_key, slots.tail_value, slots.tail_log_decay, slots.tail_beta)
    assert slots.positions is not None and slots.state is not None  # `_check`: they are tails
    stored = (slots.positions, *(log_decay if field is None else field for field in tails))
    step = _Step(config, (query, key, value, log_decay, beta), stored, batch)
    workspace = step.prepare(out.shape[0]) if is_long else log_decay
    skip = log_decay if params.skip is None else params.skip
    tensors = (*step.inputs, skip, out, slots.state, *stored, *batch_tensors(batch), workspace)
    grid = (batch.num_reqs + 1, config.HV * config.BLOCKS)
    numbers = (params.scale, batch.num_reqs, out.shape[0])
    stages = 2 if is_long and step.warps == 8 else 1
    run_kernel(
        state_step_kernel, config, grid, tensors, numbers, num_warps=step.warps, num_stages=stages
    )
    if is_long:
        step.write_tails()


class _Step(NamedTuple):
    """The launches around that of a long step.

    Attributes:
        config: constants.
        inputs: queries, keys, values, decays and beta.
        stored: positions, and the tails of keys, values, decays and beta.
        batch: lengths and slots.
    """

    config: StateConfig
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    stored: tuple[Tensor, ...]
    batch: StateBatch

    @property
    def warps(self) -> int:
        """Warps of a program. Those of AMD have 64 threads."""
        warps = state_tile(self.config.DK, self.config.DV).num_warps
        return 4 if limits_of(self.inputs[0]).is_amd else warps

    def prepare(self, num_tokens: int) -> Tensor:
        """The matrices of all chunks."""
        config, num_reqs = self.config, self.batch.num_reqs
        query, key, _, *gates = self.inputs
        positions, tail_key, _, *tails = self.stored
        chunks = num_tokens // config.C + num_reqs * config.EXTRA
        size = chunks * config.HV * 2 * config.C * config.C
        workspace = torch.empty(size, dtype=torch.float32, device=query.device)
        where = batch_tensors(self.batch)
        tensors = (query, key, *gates, positions, tail_key, *tails, *where, workspace)
        grid = (chunks, config.HV)
        run_kernel(state_matrices_kernel, config, grid, tensors, (num_reqs,), num_warps=self.warps)
        return workspace

    def write_tails(self) -> None:
        """The tails and positions, when no program reads them any more."""
        tensors = (*self.inputs[1:], *self.stored, *batch_tensors(self.batch))
        grid = (self.batch.num_reqs, self.config.HV)
        run_kernel(state_tail_kernel, self.config, grid, tensors, (), num_warps=self.warps)


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
