"""Softmax with sinks, and for rows without a visible key.

A sink is one more logit per head that has no value (M4). It can be part of the denominator from the
start (`softmax_with_sink`), or be added to a result of which the LSE is known (`add_sink`).
Weights are measured from the largest logarithm, not from their sum: at an LSE of 6e4 the sum is
rounded by 0.004, which weights would repeat.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_sink", "merge_weights", "softmax_with_sink"]


def softmax_with_sink(logits: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the last dimension, with the sinks in the denominator.

    Args:
        logits: `[H, L, S]`, -inf where hidden; S may be 0. Overwritten by the weights.
        sinks: `[H]`, or None.

    Returns:
        Weights `[H, L, S]` and natural-log LSE `[H, L]`, in the dtype of the logits, and the rows
        without a visible key, a bool `[H, L]`. Such a row has weights 0 and LSE -inf, or the sink.
    """
    sink = None if sinks is None else sinks.to(logits.dtype)[:, None].expand(logits.shape[:-1])
    if logits.shape[-1] == 0:
        lse = logits.new_full(logits.shape[:-1], -torch.inf) if sink is None else sink.contiguous()
        return logits, lse, torch.ones_like(lse, dtype=torch.bool)
    peak = logits.amax(dim=-1)
    empty = peak == -torch.inf
    if sink is not None:
        peak = torch.maximum(peak, sink)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = logits.sub_(peak.unsqueeze(-1)).exp_()
    total = weights.sum(dim=-1)
    if sink is not None:
        total = total + torch.exp(sink - peak)
    lse = peak + torch.log(total)
    return weights.div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1)), lse, empty


def add_sink(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` with the sinks added to the denominator.

    Args:
        out: `[..., Hq, L, Dv]`.
        lse: `[..., Hq, L]`.
        sinks: `[Hq]`, or one for each LSE; +inf counts as NaN, as it does in `softmax_with_sink`.
    """
    sink = sinks.to(lse.dtype)
    sink = sink[:, None] if sink.dim() == 1 else sink
    sink = sink.masked_fill(sink == torch.inf, torch.nan)
    weights, total = merge_weights(torch.stack([lse, sink.expand_as(lse)]))
    return out * weights[0].unsqueeze(-1), total


def merge_weights(logs: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of states over disjoint keys, and the LSE over all of them.

    Args:
        logs: `[S, ...]`, the LSE of each state; -inf for one without keys.

    Returns:
        Weights `[S, ...]`, whose sum over the states is 1, or 0 where no state has keys, and the
        LSE `[...]`.
    """
    largest = logs.amax(dim=0)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = torch.exp(logs - largest)
    total = weights.sum(dim=0)
    return weights / total.masked_fill(total == 0, 1.0), largest + torch.log(total)
