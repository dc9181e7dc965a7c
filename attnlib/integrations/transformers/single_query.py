"""The values of the mask of a decode: one causal query per row."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.integrations.transformers.layers import current_stream, is_capturing
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.step_mask import StepMask

__all__ = ["counted_mask", "single_query_mask"]

_MAX_COLUMNS = 8
"""Sizes whose columns are kept: those of a static cache and its windows are equal in all steps."""


def single_query_mask(step: StepMask) -> torch.Tensor | None:
    """The evaluated mask `[B, 1, 1, S]` of one causal query per row; None for other masks."""
    pattern, keys = step.pattern, step.kv_length
    if pattern is None or step.q_length != 1 or not (pattern.causal and pattern.is_plain):
        return None
    width = step.q_offset + 1 - step.kv_offset  # `StepMask.width`, if there are so many keys
    if keys < width or keys < 1:
        return None
    padding = None if step.attention_mask is None else step.padding()
    left, batch = pattern.window.left, step.batch_size
    first = 0 if left is None else min(max(width - 1 - left, 0), width)
    if first == 0:  # the code below takes five operations
        if padding is None:
            return torch.lt(_columns(batch, keys, step.device), width)
        if padding.dtype == torch.bool:
            return torch.constant_pad_nd(padding, (0, keys - width)).view(batch, 1, 1, keys)
    mask = torch.zeros(batch, 1, 1, keys, dtype=torch.bool, device=step.device)
    visible = mask.narrow(3, first, width - first)
    if padding is None:
        visible.fill_(True)
    else:
        visible.copy_(padding[:, None, None, first:])
    return mask


def counted_mask(pattern: Pattern | None, given: dict[str, Any]) -> torch.Tensor | None:
    """The same where the number of earlier tokens is on the device and is not read: up to three
    launches instead of thirty, which a compiled decode waits for; None for other masks.

    Args:
        pattern: of the mask.
        given: arguments of the mask function, with one query.
    """
    if pattern is None or not (pattern.causal and pattern.is_plain):
        return None
    batch, keys, device = given["batch_size"], given["kv_length"], torch.device(given["device"])
    begin, padding, left = given["kv_offset"], given["attention_mask"], pattern.window.left
    if padding is not None and (padding.dtype != torch.bool or padding.device != device):
        return None
    columns = _columns(batch, keys, device, current_stream(device))
    last = given["q_offset"] - begin if begin else given["q_offset"]
    mask = torch.le(columns, last)
    if left is not None and left < keys - 1:  # else the window holds all of the cache
        mask.logical_and_(columns >= last - left)
    if padding is not None:
        tokens = padding[:, begin : begin + keys]
        known = tokens.shape[1]
        mask.narrow(3, 0, known).logical_and_(tokens[:, None, None])
        if known < keys:
            mask.narrow(3, known, keys - known).zero_()
    return mask


def _columns(batch: int, keys: int, device: torch.device | str, stream: int = 0) -> torch.Tensor:
    """Columns of a mask `[B, 1, 1, S]`. A graph has its own, as kept ones are dropped."""
    sizes, captures = (batch, keys, device, stream), is_capturing(torch.device(device))
    found = None if captures else _kept_columns.get(sizes)
    if found is None:
        with torch.inference_mode(False):
            found = torch.arange(keys, device=device).repeat(batch, 1, 1, 1)
        if captures:
            return found
        if len(_kept_columns) >= _MAX_COLUMNS:
            _kept_columns.clear()
        _kept_columns[sizes] = found
    return found


_kept_columns: dict[tuple[Any, ...], torch.Tensor] = {}
