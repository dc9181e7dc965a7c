"""Scales of queries and of float8 caches, as FlashAttention 3 takes them."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache, Scale
from attnlib.ops.scales import valid_scale

__all__ = ["Descales"]

_MAX_DESCALES = 64
"""Scale tensors of one layer: one for each scale that its caches had."""
_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


class Descales:
    """Quantizes queries, and keeps the scales of a layer's caches as tensors."""

    def __init__(self) -> None:
        self._descales: dict[tuple[float, torch.device], torch.Tensor] = {}

    def add_to(
        self,
        arguments: dict[str, Any],
        query: torch.Tensor,
        cache: PagedKVCache,
        num_reqs: int,
    ) -> None:
        """Quantize the query, which must be float8 for a float8 cache, and pass all scales.

        The scale of the query maps its largest element to the largest float8 value.
        """
        scale = (query.abs().amax().float() / _FLOAT8_MAX).clamp(
            min=torch.finfo(torch.float32).tiny
        )
        arguments["q"] = (query.float() / scale).to(torch.float8_e4m3fn)
        shape = (num_reqs, cache.num_kv_heads)
        arguments["q_descale"] = scale.view(1, 1).expand(shape)
        k_scale = self._descale(cache.k_scale, query.device)
        v_scale = self._descale(cache.v_scale, query.device)
        if isinstance(cache.k_scale, torch.Tensor):
            # The kernel may take a row whose scores are all NaN for an empty one.
            v_scale = torch.where(k_scale.isnan(), k_scale, v_scale)
        arguments["k_descale"] = k_scale.expand(shape)
        arguments["v_descale"] = v_scale.expand(shape)

    def _descale(self, scale: Scale, device: torch.device) -> torch.Tensor:
        """A scale as a `[1, 1]` or `[1, Hkv]` tensor; floats are copied to the device once."""
        if isinstance(scale, torch.Tensor):
            return valid_scale(scale).view(1, -1)
        known = self._descales.get((scale, device))
        if known is None:
            if len(self._descales) >= _MAX_DESCALES:
                self._descales.clear()
            known = self._descales[scale, device] = torch.full(
                (1, 1), scale, dtype=torch.float32, device=device
            )
        return known
