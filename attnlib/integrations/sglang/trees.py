"""Verification of trees of draft tokens: SGLang's mask as a bias among the new tokens.

SGLang gives a mask to each verification, in one of two forms: over all keys of a request, or over
its draft tokens. Keys before the draft tokens are always visible.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["TreeMasks", "tree_bias"]


def tree_bias(mask: torch.Tensor, seq_lens: torch.Tensor, drafted: int) -> torch.Tensor:
    """The bias of a batch, `[R * drafted, drafted]` float32, without a host sync.

    Args:
        mask: bool, flat, request after request: `[drafted, drafted]`, or `[drafted, length +
            drafted]` of a request. More elements may follow.
        seq_lens: `[R]`, lengths without the draft tokens; at least 1.
        drafted: draft tokens per request (n).
    """
    requests, device = len(seq_lens), mask.device
    tokens = torch.arange(drafted, device=device)
    if mask.numel() == requests * drafted**2:
        visible = mask.view(-1, drafted)
    else:
        lengths = seq_lens.to(device, torch.int64)
        columns = lengths + drafted
        starts = (columns.cumsum(0) - columns) * drafted
        index = (
            (starts + lengths)[:, None, None]
            + tokens[:, None] * columns[:, None, None]
            + tokens[None, None]
        )
        # SGLang pads the requests of graphs, but not always their masks.
        visible = mask[index.clamp_(max=mask.numel() - 1)].view(-1, drafted)
    seen = torch.zeros(visible.shape, dtype=torch.float32, device=device)
    return seen.masked_fill_(~visible.bool(), -torch.inf)


class TreeMasks:
    """The buffer that the draft stage fills, and the bias that layers read.

    Args:
        max_requests: of the largest captured batch.
        drafted: draft tokens per request.
        device: of the model.

    Attributes:
        verify_mask: SGLang's `VerifyMask` of `[max_requests, n, n]`; None where SGLang has none
            (0.5.17).
    """

    def __init__(self, max_requests: int, drafted: int, device: torch.device) -> None:
        self._drafted = drafted
        shape = (max_requests * drafted, drafted)
        self._bias = torch.zeros(shape, dtype=torch.float32, device=device)
        self.verify_mask = _verify_mask(max_requests, drafted, device)

    def fill(self, batch_info: Any, seq_lens: torch.Tensor) -> torch.Tensor:
        """The bias of a batch that fits, in memory that graphs read."""
        rows = self._bias[: len(seq_lens) * self._drafted]
        return rows.copy_(self.bias(batch_info, seq_lens))

    def bias(self, batch_info: Any, seq_lens: torch.Tensor) -> torch.Tensor:
        """The bias of a batch.

        Args:
            batch_info: SGLang's `spec_info`.
            seq_lens: lengths without the draft tokens.
        """
        mask, own = batch_info.custom_mask, self.verify_mask
        if own is not None and mask.data_ptr() == own.buffer.data_ptr():
            mask = mask[: len(seq_lens) * self._drafted**2]
        return tree_bias(mask, seq_lens, self._drafted)


def _verify_mask(max_requests: int, drafted: int, device: torch.device) -> Any:
    try:
        from sglang.srt.layers.attention.verify_mask import VerifyMask
        from sglang.srt.speculative.eagle_utils import TreeMaskMode
    except ImportError:
        return None
    buffer = torch.zeros(max_requests * drafted**2, dtype=torch.bool, device=device)
    return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=max_requests)
