"""Conversion of third-party kernels' outputs: natural LSE, empty rows, padding rows, sinks.

Nothing here synchronizes with the device, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from attnlib.metadata.paged import PagedMetadata

__all__ = [
    "apply_sinks",
    "clear_rows",
    "convert_base2_lse",
    "fill_empty",
    "find_rows_without_keys",
    "is_capturing",
    "rows_without_keys",
    "same_batch_at_replay",
    "store_lse",
]

LOG_2 = math.log(2.0)

_same_batch: ContextVar[bool] = ContextVar("same_batch", default=False)


@contextmanager
def same_batch_at_replay() -> Iterator[None]:
    """Declare that graphs captured inside are replayed with the batch they were captured with.

    Lengths on the host are then valid at replay, and kernels that only clear padding rows are not
    launched. Benchmarks use this to time a third-party kernel alone.
    """
    token = _same_batch.set(True)
    try:
        yield
    finally:
        _same_batch.reset(token)


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured; lengths on the host may differ at replay."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing() and not _same_batch.get()


def fill_empty(
    output: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None = None
) -> None:
    """Write the result of rows that see no key (M5): output 0; LSE -inf, or the sink.

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
    """Set the rows at or past the batch's tokens to output 0 and LSE -inf (M6).

    Args:
        output: `[T, Hq, Dv]`; may hold NaN there.
        lse: `[T, Hq]` float32.
        query_start_loc: `[R + 1]` int32; the last element is the number of tokens.
        known_end: that number, if the host knows it; None reads it on the device (CUDA graphs).
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
    """Copy a natural-log LSE `[T, Hq]` of any strides to `target`.

    +inf and NaN, which some kernels write for rows that see no key, become -inf (M5).
    """
    torch.nan_to_num(source, nan=-math.inf, posinf=-math.inf, neginf=-math.inf, out=target)


def convert_base2_lse(lse_base2: torch.Tensor, target: torch.Tensor, empty: torch.Tensor) -> None:
    """Write a base-2 LSE as natural logarithm to `target`.

    Args:
        lse_base2: `[T, Hq]` float32.
        target: `[T, Hq]` float32, written; may be `lse_base2`.
        empty: `[T]` bool, rows that see no key (M5). Kernels write a finite number there, which
            other rows may have too.
    """
    torch.mul(lse_base2, LOG_2, out=target)
    target.masked_fill_(empty.unsqueeze(-1), -math.inf)


def rows_without_keys(
    metadata: PagedMetadata, rows: slice, up_to_own: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Which queries see no key, by the lengths on the device: `[rows]` bool.

    Args:
        metadata: the batch.
        rows: of the queries; the decodes, one per request, or others.
        up_to_own: keys after the query's own are hidden.
        out: `[rows]` bool, memory for the result; None allocates it.
    """
    starts, seq_lens = metadata.query_start_loc, metadata.seq_lens
    each_one = metadata.max_decode_query_len <= 1 and rows.stop == metadata.num_decodes
    if rows.start == 0 and each_one:
        return torch.le(seq_lens[rows], 0, out=out)  # may be captured: nothing is kept
    kept: dict[Any, torch.Tensor] = vars(metadata).setdefault("_rows_without_keys", {})
    key = (rows.start, rows.stop, up_to_own)
    if key not in kept:
        kept[key] = find_rows_without_keys(starts, seq_lens, rows, up_to_own)
    return kept[key]


def find_rows_without_keys(
    starts: torch.Tensor, seq_lens: torch.Tensor, rows: slice, up_to_own: bool
) -> torch.Tensor:
    """As `rows_without_keys`, computed by each call, so that a graph computes it at each replay.

    Args:
        starts: `[R + 1]` int32, the first row of each request.
        seq_lens: `[R]` int32.
        rows: of the queries.
        up_to_own: keys after the query's own are hidden.
    """
    tokens = torch.arange(rows.start, rows.stop, dtype=starts.dtype, device=starts.device)
    request = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
    request = request.clamp_(max=max(seq_lens.shape[0] - 1, 0))
    if up_to_own:
        return seq_lens[request] - starts[request + 1] + tokens < 0
    return seq_lens[request] <= 0


def apply_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Add one sink logit per head to results that were computed without sinks (M4), in place.

    Args:
        output: `[T, Hq, Dv]`.
        lse: `[T, Hq]` float32, natural logarithm, -inf for rows that see no key.
        sinks: `[Hq]` float32; -inf has no effect, +inf counts as NaN.
    """
    sinks = sinks.masked_fill(sinks == math.inf, math.nan)
    # The difference is NaN where both are -inf.
    share = torch.sigmoid(lse - sinks).masked_fill(torch.isneginf(sinks), 1.0)
    output.mul_(share.unsqueeze(-1))
    torch.logaddexp(lse, sinks.expand_as(lse), out=lse)
