"""Step plans over rotated heads (P15) whose kernels rotate."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from attnlib.backends.triton.launches import LayerCall
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.backends.triton.plan import TritonPlan
from attnlib.cache.storage import PagedKVCache
from attnlib.kv_rotation import KVRotation

__all__ = ["make_rotating_plan"]

_DECODES_ROTATE = _PREFILLS_ROTATE = False
"""Whether decodes rotate queries and outputs in their kernels, and prefills over copies of the
cache rotate these; not measured yet."""


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
    if not query.shape[0] or not cache.key_cache.shape[0] or self._kernels == "portable":
        return None
    prefills = metadata.num_prefills or not metadata.num_decodes
    known = (_DECODES_ROTATE or not metadata.num_decodes) and (_PREFILLS_ROTATE or not prefills)
    if self.spec.batch_invariant or not known:
        return None
    call = LayerCall(query, key, value, cache, output, lse)
    plan = TritonPlan(self, signature, call, metadata, self._kernels, rotation)
    return plan if plan.rotates else None
