"""The fields of a batch that follow from lengths on the host."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.metadata.lengths import upper_bound

__all__ = ["length_fields", "request_starts"]


def request_starts(queries: torch.Tensor) -> torch.Tensor:
    """The first token of each request, then T, `[R + 1]` int32 on the host."""
    starts = torch.zeros(len(queries) + 1, dtype=torch.int32, device="cpu")
    torch.cumsum(queries, 0, out=starts[1:])
    return starts


def length_fields(
    device: torch.device,
    starts: torch.Tensor,
    queries: torch.Tensor,
    sequences: torch.Tensor,
    max_query_len: int | None,
    max_seq_len: int | None,
) -> dict[str, Any]:
    """The fields that follow from starts `[R + 1]` and lengths `[R]` on the host, and bounds."""
    return {
        "max_query_len": upper_bound("max_query_len", max_query_len, "query_lens", queries),
        "max_seq_len": upper_bound("max_seq_len", max_seq_len, "seq_lens", sequences),
        "query_start_loc": starts.to(device, non_blocking=True),
        "query_start_loc_cpu": starts,
        "seq_lens": sequences.to(device, non_blocking=True),
        "seq_lens_cpu": sequences,
        "num_computed_tokens_cpu": (sequences - starts[1:] + starts[:-1]).clamp(min=0),
        "num_reqs": len(sequences),
        "num_actual_tokens": int(starts[-1]),
    }
