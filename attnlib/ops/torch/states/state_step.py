"""One step of a recurrence over a batch (T1 to T14)."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.states.batch import StateBatch
from attnlib.ops.states.checks import check_positions, check_slots
from attnlib.ops.states.params import RecurrenceParams
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.torch.states.forms import RequestStep
from attnlib.ops.torch.states.recurrence import StepInputs

__all__ = ["state_step"]


@torch.no_grad()
@without_autocast
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
    """Update the states of a batch with its new tokens, and write the outputs.

    Args:
        query, key: `[T', Hk, Dk]` with T' >= T, strided; a backend may need a dense last dimension.
        value: `[T', Hv, Dv]`, likewise.
        log_decay: float32, `[T', Hv]` or `[T', Hv, Dk]` as `slots.layout.decay` says, or `[Hv]` of
            the layer if that is "constant" (T5).
        beta: `[T', Hv]` float32; None exactly if the layout has none.
        slots: the slots of the layer; those of the batch are written.
        batch: lengths and slots.
        params: scale, update, norm and skip.
        out: `[T', Hv, Dv]`, strided, written in place. Rows past the batch and rows of requests
            without a slot are 0 (T3).

    Raises:
        ContractError: slots outside the pool or written twice (T7, T12), or a slot that cannot
            continue from where its request does (T8). Nothing is written then.
    """
    requests = list(batch.requests())
    check_slots(requests, slots.num_slots)
    assert slots.positions is not None  # a layout with a recurrence has positions
    check_positions(requests, slots.positions[:, 0, 0], "state")
    inputs = StepInputs(query, key, value, log_decay, beta)
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    out.zero_()
    for request in requests:
        part = inputs.rows(request.rows)
        result = RequestStep(slots, params, request, part, dtype).run().transpose(0, 1)
        if params.skip is not None:
            result = result + params.skip.to(dtype)[:, None] * part.value.to(dtype)
        out[request.rows] = result.to(out.dtype)
