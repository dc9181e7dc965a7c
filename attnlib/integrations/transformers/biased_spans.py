"""Attention of one query per row under a position bias, with torch's operator for a CPU."""

from __future__ import annotations

from weakref import ref

import torch

from attnlib.integrations.transformers.decode_spans import Spans, narrowed
from attnlib.integrations.transformers.layers import tensor_version

__all__ = ["BiasedSpans", "attend_biased"]


class BiasedSpans:
    """The visible keys of a step whose layers pass a position bias.

    Models that compute the bias in their first layer pass one tensor to all layers, which is
    combined with the hidden keys once.

    Args:
        spans: the visible keys, for one call of the operator.

    Attributes:
        added: what the last layer adds to its scores, `[B or 1, Hq or 1, 1, keys of the spans]`.
    """

    __slots__ = ("_given", "_version", "added", "spans")

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self.added: torch.Tensor | None = None
        self._given: ref[torch.Tensor] | None = None
        self._version = -1

    def take(self, bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Add the bias of a layer; False for one that the operator does not add.

        Args:
            bias: `[B or 1, Hq or 1, 1, S]`.
            query, key: `[B, Hq, 1, D]` and `[B, Hkv, S, D]`.
        """
        if bias is None:
            return False
        if bias is self.added:  # a layer before has passed it, and all its keys are visible
            return True
        version = tensor_version(bias)
        if self._given is not None and self._given() is bias and version == self._version >= 0:
            return True
        (batch, heads, *_), (_, kv_heads, keys, _) = query.shape, key.shape
        if bias.dim() != 4 or bias.shape[2:] != (1, keys) or bias.dtype != query.dtype:
            return False
        if bias.device != query.device or bias.shape[0] not in (1, batch):
            return False
        if heads != kv_heads or bias.shape[1] not in (1, heads):
            return False
        start, end, hidden = self.spans.start, self.spans.end, self.spans.bias
        added = bias if end - start == keys else bias[..., start:end]
        self.added = added if hidden is None else added + hidden
        self._given, self._version = ref(bias), version
        return True


def attend_biased(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    biased: BiasedSpans,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The attention, `[B, 1, Hq, D]`, under the bias that `biased` has taken.

    Args:
        query, key, value: `[B, Hq, 1, D]`, `[B, Hq, S, D]`, `[B, Hq, S, D]`.
        biased: the visible keys, and what is added to their scores.
        scale: of the layer.
        soft_cap, sinks: None.
    """
    key, value = narrowed(key, value, biased.spans)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, biased.added, scale=scale).transpose(1, 2)
