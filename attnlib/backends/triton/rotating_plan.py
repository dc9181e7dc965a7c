"""Step plans over rotated heads (P15) whose kernels rotate."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from attnlib.backends.triton.launches import LayerCall
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.backends.triton.plan import TritonPlan, batch_of, find_step
from attnlib.cache.storage import PagedKVCache
from attnlib.kv_rotation import KVRotation

__all__ = ["make_rotating_plan"]


def make_rotating_plan(
    self: Any,  # a `TritonImpl`, whose method this is
    rotation: KVRotation,
    signature: Hashable,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: PagedKVCache,
    metadata: TritonMetadata,
    output: Tensor,
    lse: Tensor | None,
) -> TritonPlan | None:
    """See `AttentionImpl.rotating_plan`: Hopper decodes over quantized caches, and prefills over
    copies of pages."""
    if not query.shape[0] or not cache.key_cache.shape[0]:
        return None
    if self._kernels == "portable" or self.spec.batch_invariant:
        return None
    call = LayerCall(query, key, value, cache, output, lse)
    found = find_step(self, signature, call, metadata, batch_of(metadata), self._kernels, rotation)
    if found.rotated is None:  # short prefills, and decodes by the portable kernels
        return None
    return TritonPlan(self, signature, call, metadata, self._kernels, rotation)
