"""Serving a call as one before it: which calls of which layers are alike, so that only addresses differ.

A layer looks at every tensor of a call before anything is launched, and the operations look again at what their launches
follow from. Between the layers of a step that is the same each time. `likeness` takes it all in one look; where a call
like it has been served over the same batch, `AttentionImpl.settle` may have left what serves it again at once.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from attnlib import env
from attnlib.backends.base import AttentionImpl
from attnlib.cache.storage import PagedKVCache

if TYPE_CHECKING:
    from attnlib.layer import Attention

__all__ = ["likeness", "meaning_of", "remember"]

_ONE = {1.0}  # as a set: a tensor hashes as itself and is no member, whatever it holds
_numbers = count()
_meanings: dict[Any, int] = {}


def meaning_of(layer: Attention) -> int | None:
    """A number that layers share when equal tensors mean equal launches to them, in this process; None for those whose backend settles nothing."""
    if not layer.writes or type(layer.impl).settle is AttentionImpl.settle:
        return None
    return _meanings.setdefault((layer.backend, layer.spec, layer.impl.scale), next(_numbers))


def likeness(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache | None,
    metadata: Any,
    output: torch.Tensor | None,
) -> tuple[Any, ...] | None:
    """All but the batch and addresses that a call without LSE follows from, everything that `check_call` reads included; None where it has to be
    served the usual way: nothing to write, scales, ATTNLIB_VALIDATE, or metadata that remembers nothing. The tensors are flat or per head."""
    if (
        layer.meaning is None
        or key is None
        or value is None
        or cache is None
        or not hasattr(metadata, "settled")
    ):
        return None
    if {layer.k_scale, layer.v_scale, cache.k_scale, cache.v_scale} != _ONE or env.read(
        "ATTNLIB_VALIDATE"
    ):
        return None
    keys, values = cache.key_cache, cache.value_cache
    return (
        layer.meaning, cache.layout,
        query.shape, query.stride(), query.dtype, query.get_device(), key.shape, key.stride(), key.dtype, key.get_device(),
        value.shape, value.stride(), value.dtype, value.get_device(),
        keys.shape, keys.stride(), keys.dtype, keys.get_device(), values.shape, values.stride(), values.dtype, values.get_device(),
        None if output is None else (output.shape, output.stride(), output.dtype, output.get_device()),
    )  # fmt: skip


def remember(
    layer: Attention, like: tuple[Any, ...] | None, ends: tuple[torch.Tensor, torch.Tensor], query: torch.Tensor, key: Any, value: Any, cache: Any,
    metadata: Any, output: torch.Tensor,
) -> None:  # fmt: skip
    """Ask the impl, once for each kind of call, to repeat the call just served.

    `metadata.settled` gets `(what repeats it, the output's shape)`; the shape is None where `torch.empty_like(query)` makes such an output, and it is
    None in place of the pair where nothing repeats the call.

    Args:
        like: what `likeness` said of the call.
        ends: its query and its output as they came, flat or per head.
        query, key, value, cache, metadata, output: the call, all per head.
    """
    if like is None or like in metadata.settled:
        return
    again, (asked, written) = layer.impl.settle(query, key, value, cache, metadata, output), ends
    shape = (
        None
        if asked.shape == written.shape and asked.stride() == written.stride()
        else written.shape
    )
    metadata.settled[like] = None if again is None else (again, shape)
