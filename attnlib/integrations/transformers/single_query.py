"""The values of the mask of a decode: one causal query per row."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.integrations.transformers.step_mask import StepMask

__all__ = ["single_query_mask"]


def single_query_mask(step: StepMask) -> torch.Tensor | None:
    """The evaluated mask `[B, 1, 1, S]` of one causal query per row; None for other masks."""
    pattern, keys = step.pattern, step.kv_length
    if pattern is None or step.q_length != 1 or not pattern.causal or pattern.chunk is not None:
        return None
    if pattern.segments is not None or pattern.spans is not None:
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


def _columns(*sizes: Any) -> torch.Tensor:
    """Columns of a mask `[B, 1, 1, S]`; `sizes` are B, S and the device."""
    found = _kept_columns.get(sizes)
    if found is None:
        batch, keys, device = sizes
        with torch.inference_mode(False):
            found = torch.arange(keys, device=device).repeat(batch, 1, 1, 1)
        _kept_columns.clear()
        _kept_columns[sizes] = found
    return found


_kept_columns: dict[tuple[Any, ...], torch.Tensor] = {}
"""Those of the last sizes: a static cache has the same in every step."""
