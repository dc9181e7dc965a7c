"""What foreign kernels leave behind, brought into the contract's form: natural LSE, empty rows, rows past the batch, sinks.

Everything here runs on the device without asking it anything, so it may be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = [
    "apply_sinks",
    "clear_rows",
    "fill_empty",
    "is_capturing",
    "mark_empty_rows",
    "same_batch_at_replay",
    "store_lse",
]

LOG_2 = math.log(2.0)

_same_batch: ContextVar[bool] = ContextVar("same_batch", default=False)


@contextmanager
def same_batch_at_replay() -> Iterator[None]:
    """Graphs captured inside are replayed with the very batch they were captured with, so what the host knows does hold.

    For benchmarks: a foreign kernel is then timed alone, without the kernels that clear rows which this batch does not have.
    """
    token = _same_batch.set(True)
    try:
        yield
    finally:
        _same_batch.reset(token)


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether work on this tensor's device is being captured in a CUDA graph now; what the host knows does not hold at replay then."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing() and not _same_batch.get()


def fill_empty(
    output: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None = None
) -> None:
    """The result of rows that see no key (M5): output 0, LSE -inf, or the sink itself where there is one.

    Args:
        output: `[T, Hq, Dv]`.
        lse: `[T, Hq]` float32.
        sinks: `[Hq]` float32.
    """
    output.zero_()
    if lse is not None and sinks is not None:
        lse.copy_(sinks.expand_as(lse))
    elif lse is not None:
        lse.fill_(-math.inf)


def clear_rows(
    output: torch.Tensor,
    lse: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    known_end: int | None,
) -> None:
    """Rows at or past the batch's tokens become 0 and -inf (M6).

    Args:
        output: `[T, Hq, Dv]`; may hold NaN there.
        lse: `[T, Hq]` float32.
        query_start_loc: `[R+1]` int32 device; the last entry is the number of tokens.
        known_end: that number where the host knows it; None reads it on the device (CUDA graphs).
    """
    if known_end is not None:
        if known_end < output.shape[0]:
            fill_empty(output[known_end:], None if lse is None else lse[known_end:])
        return
    past = torch.arange(output.shape[0], device=output.device) >= query_start_loc[-1]
    output.masked_fill_(past[:, None, None], 0)
    if lse is not None:
        lse.masked_fill_(past[:, None], -math.inf)


def store_lse(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a natural-log LSE `[T, Hq]` (any strides) to `target`; +inf and NaN, which some kernels write for empty rows, become -inf (M5)."""
    torch.nan_to_num(source, nan=-math.inf, posinf=-math.inf, neginf=-math.inf, out=target)


def mark_empty_rows(lse_base2: torch.Tensor, target: torch.Tensor, floor: float) -> None:
    """Copy a base-2 LSE `[T, Hq]` to `target` (which may be the same) in natural log; at or below `floor` it stands for "no key": -inf (M5)."""
    torch.mul(lse_base2, LOG_2, out=target)
    torch.threshold_(target, floor * LOG_2, -math.inf)  # the one way to do this without a temporary


def apply_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Add one sink logit per head to results computed without (M4): the denominator grows by exp(sink), the weights shrink by the same factor.

    Args:
        output: `[T, Hq, Dv]`, scaled in place.
        lse: `[T, Hq]` float32 natural log without the sink, -inf for empty rows; with the sink afterwards.
        sinks: `[Hq]` float32.
    """
    share = torch.sigmoid(lse - sinks)
    output.mul_(share.unsqueeze(-1))
    torch.logaddexp(lse, sinks.expand_as(lse), out=lse)
