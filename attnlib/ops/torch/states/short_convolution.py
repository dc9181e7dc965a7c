"""The causal convolution before a recurrence, over a batch (T6)."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.states.batch import StateBatch, StateRequest
from attnlib.ops.states.checks import checked_requests
from attnlib.ops.states.inputs import Taps
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.torch.states.step_parts import sigmoid

__all__ = ["inputs_before", "short_convolution"]


@torch.no_grad()
@without_autocast
def short_convolution(
    x: Tensor, taps: Taps, slots: StateTensors, batch: StateBatch, *, out: Tensor
) -> None:
    """Convolve each channel over the last W tokens of its request, and keep the window.

    Args:
        x: `[T', C]` with T' >= T, strided.
        taps: of the convolution.
        slots: the slots of the layer; the windows of the batch are written.
        batch: lengths and slots.
        out: `[T', C]`, strided, written in place; not `x`. Rows past the batch and rows of requests
            without a slot are 0 (T3).

    Raises:
        ContractError: as `state_step`.
    """
    requests = checked_requests(batch, slots, "window")
    out.zero_()
    for request in requests:
        before = inputs_before(slots, request)
        rows = torch.cat([before, x[request.rows].to(before.dtype)])
        out[request.rows] = _convolve(rows, taps).to(out.dtype)
        _write_window(slots, request, rows)


def inputs_before(slots: StateTensors, request: StateRequest) -> Tensor:
    """The last inputs before the step, `[W - 1, C]`, oldest first; 0 before the request."""
    window, width = slots.window, slots.layout.conv_width - 1
    before, end = window.new_zeros(width, window.shape[2]), request.computed
    if end:  # else the source is not read
        held = torch.arange(max(end - width, 0), end, device=window.device)
        before[width - len(held) :] = window[request.source, held % window.shape[1]]
    return before


def _convolve(rows: Tensor, taps: Taps) -> Tensor:
    """`[W - 1 + n, C]` -> `[n, C]`, rounded once by the caller."""
    width = taps.weight.shape[1]
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    count = rows.shape[0] - width + 1
    rows, weight = rows.to(dtype), taps.weight.to(dtype)
    total = rows[:count] * weight[:, 0]
    for j in range(1, width):
        total = total + rows[j : j + count] * weight[:, j]
    if taps.bias is not None:
        total = total + taps.bias.to(dtype)
    return total if taps.activation is None else total * sigmoid(total)


def _write_window(slots: StateTensors, request: StateRequest, rows: Tensor) -> None:
    """Keep the inputs that a next step may need: D + W - 1 before `high`, as far as they are new
    or, for another slot than the source, known."""
    window, positions = slots.window, slots.window_positions
    known = request.end - rows.shape[0]  # position of the first row
    low = slots.layout.first_kept(request.computed, request.end)
    first = max(low - (slots.layout.conv_width - 1), known, 0)
    if request.source == request.slot:
        first = max(first, request.computed)
    kept = torch.arange(first, request.end, device=window.device)
    window[request.slot, kept % window.shape[1]] = rows[first - known :]
    positions[request.slot, 0] = low
    positions[request.slot, 1] = request.end
