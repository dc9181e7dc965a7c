"""Serving a call as one before it: which calls of which layers are alike, so that only addresses differ.

A layer looks at every tensor of a call before anything is launched, and the operations look again at what their launches
follow from. Between the layers of a step that is the same each time. `likeness` takes it all in one look; where a call
like it has been served over the same batch, `AttentionImpl.settle` may have left what serves it again at once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from attnlib.backends.base import AttentionImpl
from attnlib.cache.storage import PagedKVCache

if TYPE_CHECKING:
    from attnlib.layer import Attention

__all__ = ["likeness", "meaning_of"]

_NO_SCALES = (1.0, 1.0, 1.0, 1.0)
_meanings: dict[Any, int] = {}


def meaning_of(layer: Attention) -> int | None:
    """A number that layers share when equal tensors mean equal launches to them, in this process; None for those whose backend settles nothing."""
    if not layer.writes or type(layer.impl).settle is AttentionImpl.settle:
        return None
    return _meanings.setdefault((layer.backend, layer.spec, layer.impl.scale), len(_meanings))


def likeness(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache | None,
    metadata: Any,
    output: torch.Tensor,
    lse: torch.Tensor | None,
) -> tuple[Any, ...] | None:
    """All but the batch and addresses that a call follows from, everything that `check_call` reads included; None where it has to be served the
    usual way: nothing to write, an LSE, scales, ATTNLIB_VALIDATE, or metadata that remembers nothing."""
    if layer.meaning is None or key is None or value is None or cache is None or lse is not None or not hasattr(metadata, "settled"):
        return None
    scales = (layer.k_scale, layer.v_scale, cache.k_scale, cache.v_scale)
    if not all(type(scale) is float for scale in scales) or scales != _NO_SCALES or "ATTNLIB_VALIDATE" in os.environ:
        return None
    keys, values = cache.key_cache, cache.value_cache
    return (
        layer.meaning, cache.layout,
        query.shape, query.stride(), query.dtype, query.get_device(), key.shape, key.stride(), key.dtype, key.get_device(),
        value.shape, value.stride(), value.dtype, value.get_device(), output.shape, output.stride(), output.dtype, output.get_device(),
        keys.shape, keys.stride(), keys.dtype, keys.get_device(), values.shape, values.stride(), values.dtype, values.get_device(),
    )  # fmt: skip
