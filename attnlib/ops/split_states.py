"""States of a decode whose splits have not been combined."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["SplitStates"]


class SplitStates(NamedTuple):
    """What a decode over split keys leaves in its workspace, until the next decode.

    Attributes:
        outs, lses: float32 partial outputs and base-2 LSEs, `[partial results * rows, Dv]` and
            `[partial results * rows]`, flat.
        headers: `[T * Hkv]` int32, of each token and KV head: bits 0 to 8 the number of splits,
            bits 9 to 14 the first row of the token, from bit 15 on the first partial result. States
            of one split are in the output.
        starts: `[R + 1]` int32; tokens from the last one on are not part of the batch.
        rows: of a partial result.
    """

    outs: Tensor
    lses: Tensor
    headers: Tensor
    starts: Tensor
    rows: int

    @classmethod
    def of(cls, tokens: int, kv_heads: int, device: torch.device) -> SplitStates:
        """Of a batch whose states are all in the output, for a warm-up."""
        outs = torch.empty(1, dtype=torch.float32, device=device)
        headers = torch.ones(tokens * kv_heads, dtype=torch.int32, device=device)
        starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        return cls(outs, outs, headers, starts, 1)
