"""One step of a recurrence over a batch (T1 to T14)."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.states.batch import StateBatch
from attnlib.ops.states.checks import checked_requests
from attnlib.ops.states.inputs import RecurrenceParams, StateInputs
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.torch.states.forms import RequestStep

__all__ = ["state_step"]


@torch.no_grad()
@without_autocast
def state_step(
    inputs: StateInputs,
    slots: StateTensors,
    batch: StateBatch,
    params: RecurrenceParams,
    *,
    out: Tensor,
) -> None:
    """Update the states of a batch with its new tokens, and write the outputs.

    Args:
        inputs: of T' >= T tokens, with decays and beta as the layout says (T5).
        slots: the slots of the layer; those of the batch are written.
        batch: lengths and slots.
        params: scale, update, norm and skip.
        out: `[T', Hv, Dv]`, strided, written in place. Rows past the batch and rows of requests
            without a slot are 0 (T3).

    Raises:
        ContractError: slots outside the pool or written twice (T7, T12), or a slot that cannot
            continue from where its request does (T8). Nothing is written then.
    """
    requests = checked_requests(batch, slots, "state")
    dtype = torch.float64 if inputs.value.dtype == torch.float64 else torch.float32
    out.zero_()
    for request in requests:
        part = inputs.rows(request.rows)
        result = RequestStep(slots, params, request, part, dtype).run().transpose(0, 1)
        if params.skip is not None:
            result = result + params.skip.to(dtype)[:, None] * part.value.to(dtype)
        out[request.rows] = result.to(out.dtype)
