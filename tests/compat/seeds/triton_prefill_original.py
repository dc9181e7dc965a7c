"""vLLM's Triton prefill in plain torch, written from the fifth seed document."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KERNEL_ARGUMENTS", "context_attention_fwd", "get_block_size"]

KERNEL_ARGUMENTS = (
    *("Q", "K", "V", "sm_scale", "B_Start_Loc", "B_Seqlen", "Out"),
    *(f"stride_{tensor}{axis}" for tensor in "qkvo" for axis in ("bs", "h")),
    *("kv_group_num", "BLOCK_M", "BLOCK_DMODEL", "BLOCK_N"),
    *("IS_CAUSAL", "SLIDING_WINDOW_Q", "SLIDING_WINDOW_K", "Lk"),
)
"""Parameters of `_fwd_kernel`."""


def context_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    b_start_loc: Tensor,
    b_seq_len: Tensor,
    max_input_len: int,
    is_causal: bool = True,
    softmax_scale: float | None = None,
    sliding_window_q: int | None = None,
    sliding_window_k: int | None = None,
) -> None:
    """One row of one head at a time, as the masks of the listed kernel say."""
    scale = 1.0 / (q.shape[-1] ** 0.5) if softmax_scale is None else softmax_scale
    before, after = sliding_window_q or 0, sliding_window_k or 0
    group = q.shape[1] // k.shape[1]
    for sequence in range(b_seq_len.shape[0]):
        start, length = int(b_start_loc[sequence]), int(b_seq_len[sequence])
        for row in range(length):
            seen = [
                start + column
                for column in range(length)
                if (not is_causal or column <= row)
                and (before <= 0 or row - column <= before)
                and (after <= 0 or column - row <= after)
            ]
            for head in range(q.shape[1]):
                keys, values = k[seen, head // group].float(), v[seen, head // group].float()
                weights = (keys @ q[start + row, head].float() * scale).softmax(0)
                o[start + row, head] = (weights @ values).to(o.dtype)


def get_block_size(dtype: torch.dtype) -> int:
    if dtype == torch.float32:
        return 32
    is_recent = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
    return 128 if is_recent else 64
