"""Decodes on a CPU, layers of a step after the first one.

A forward reads all weights between two layers, so that the code and the objects of a call come from
memory again: each function that a call enters takes several times as long as in a loop. The first
layer of a step leaves what it has found with the mask of the step. A later layer compares its
tensors and arguments with those, and calls the operator.
"""

from __future__ import annotations

from typing import Any

import torch

from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers.growing_cache import adopt
from attnlib.integrations.transformers.layers import Call
from attnlib.integrations.transformers.recorded_weights import weights_are_recorded
from attnlib.integrations.transformers.step_mask import StepMask

__all__ = ["DecodeAgain", "keep_decode"]

_PLAN = "decode again"
_ABSENT = (
    "attnlib_step",
    "write_index",
    "cu_seq_lens_q",
    "position_bias",
    "indices",
    "block_indices",
    "s_aux",
    "sinks",
    "softcap",
)
"""Arguments with which a call is not repeated."""
_attend = torch.nn.functional.scaled_dot_product_attention


class DecodeAgain:
    """What a decode of a step has found: all rows see the keys from `start` to `end`.

    Args:
        call: the attention call.
        kwargs: further arguments of it.
        start, end: the keys.
    """

    __slots__ = ("dtype", "keys", "names", "rows", "scale", "shapes", "whole")

    def __init__(self, call: Call, kwargs: dict[str, Any], start: int, end: int) -> None:
        query, key, value = call.query, call.key, call.value
        self.shapes = query.shape, key.shape, value.shape
        self.dtype, self.scale, self.names = query.dtype, call.scale, set(kwargs)
        self.keys, self.whole = slice(start, end), start == 0 and end == key.shape[2]
        group = query.shape[1] // key.shape[1]
        self.rows = (query.shape[0], key.shape[1], group, query.shape[3])

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        """Attention of another layer of the step, `[B, 1, Hq, D]`; None for a call that differs."""
        if (query.shape, key.shape, value.shape) != self.shapes or scale != self.scale:
            return None
        if not query.dtype == key.dtype == value.dtype == self.dtype or kwargs.keys() != self.names:
            return None
        for name in _ABSENT:
            if name in self.names and kwargs[name] is not None:
                return None
        if key.stride(3) != 1 or value.stride(3) != 1 or OBSERVERS:
            return None
        if torch.is_autocast_enabled("cpu"):
            return None
        adopt(key, value)
        if not self.whole:
            key, value = key[:, :, self.keys], value[:, :, self.keys]
        rows = query.reshape(self.rows)
        out = _attend(rows, key, value, scale=scale)
        return out.reshape(query.shape[0], 1, query.shape[1], query.shape[3])


def keep_decode(step: StepMask, call: Call, kwargs: dict[str, Any], start: int, end: int) -> None:
    """Keep what a decode has found, for the other layers of its step.

    Args:
        step: the mask.
        call, kwargs: the attention call; one with a soft cap, sinks or weights is not repeated.
        start, end: the keys that all rows see.
    """
    if _PLAN in step.plans or step.is_reused or call.soft_cap is not None or call.sinks is not None:
        return
    if weights_are_recorded(kwargs) or torch.is_autocast_enabled("cpu"):
        return
    step.plans[_PLAN] = DecodeAgain(call, kwargs, start, end)
