"""Attention of a rank to its keys, also between the two kernels of an exchange by memory (X6): keys
are then read while queries arrive, and the second kernel combines the splits of the keys."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from attnlib.backends.step_plan import is_current
from attnlib.cache.storage import PagedKVCache
from attnlib.instrumentation import ENVIRONMENT, OBSERVERS, VALIDATE_KEY
from attnlib.layer.call import new_lse
from attnlib.ops.split_states import SplitStates
from attnlib.parallel.metadata import ParallelMetadata

if TYPE_CHECKING:
    from attnlib.parallel.attention import ParallelAttention

__all__ = ["attend_keys", "leaves_splits"]

_MOST_PROGRAMS = 128
"""Tokens times heads of a rank, one program each, whose splits the exchange combines: with the
registers of eight warps, a multiprocessor runs one at a time."""


def attend_keys(
    layer: ParallelAttention,
    queries: Tensor,
    cache: PagedKVCache,
    metadata: ParallelMetadata,
    by_memory: bool,
) -> tuple[Tensor, Tensor, SplitStates | None]:
    """`ParallelAttention.attend_cached`, and states that are in splits.

    Args:
        by_memory: the launch before is that of `share_words`, the next one that of `merge_words`.
    """
    cached, impl = layer.cached, cast(Any, layer.cached.impl)
    if not by_memory or metadata.over_context or metadata.empty is not None:
        return *layer.attend_cached(queries, cache, metadata), None
    batch = metadata.behind_queries
    assert batch is not None
    is_large = queries.shape[0] * layer.spec.num_heads > _MOST_PROGRAMS
    if is_large or OBSERVERS or VALIDATE_KEY in ENVIRONMENT or not leaves_splits(impl):
        return *cached(queries, None, None, cache, batch, True), None
    shape = (queries.shape[0], cached.spec.num_heads, cached.spec.head_size_v)
    out = torch.empty(shape, dtype=queries.dtype, device=queries.device)
    lse = new_lse(cached.spec, queries)
    return out, lse, impl.forward_uncombined(queries, cache, batch, out, lse)


def leaves_splits(impl: Any) -> bool:
    """Whether an `AttentionImpl` has `forward_uncombined`, and neither a subclass nor an assignment
    replaced `forward` or `plan` without it."""
    return _has_current(impl.__class__) and impl.group.has_plan


@functools.lru_cache(maxsize=64)
def _has_current(cls: type[Any]) -> bool:
    name = "forward_uncombined"
    return hasattr(cls, name) and is_current(cls, name, "forward", "plan")
