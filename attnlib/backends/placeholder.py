"""The backend of models without attention: it has metadata, but no layer may run on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.cache.storage import BlockPairs, PagedKVCache
from attnlib.errors import UnsupportedConfigError
from attnlib.ops.block_moves import KeysAndValues

__all__ = ["PlaceholderBackend"]


class PlaceholderBackend(AttentionBackend):
    """What `get_attn_backend(..., is_attention_free=True)` returns, as in vLLM.

    Runners can build metadata and size a cache with it. It supports no layer and is not registered.
    """

    description = "models without attention"

    @staticmethod
    def get_name() -> str:
        return "no_attention"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return _PlaceholderImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype: str | torch.dtype = "auto",
    ) -> tuple[int, ...]:
        """One element: there are no keys."""
        return (1, 1, 1, 1, 1)

    @staticmethod
    def copy_blocks(
        kv_caches: Sequence[PagedKVCache] | Sequence[KeysAndValues], src_to_dists: BlockPairs
    ) -> None:
        """Does nothing: there are no blocks."""

    @staticmethod
    def swap_blocks(
        src_kv_cache: PagedKVCache | KeysAndValues,
        dst_kv_cache: PagedKVCache | KeysAndValues,
        src_to_dst: BlockPairs,
    ) -> None:
        """Does nothing: there are no blocks."""


class _PlaceholderImpl(AttentionImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.forward()

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedConfigError: the model was declared to have no attention."""
        raise UnsupportedConfigError(
            "the backend of a model without attention (is_attention_free=True) runs no layer: "
            "select a backend with is_attention_free=False",
            backend="no_attention",
            reasons=["is_attention_free"],
        )
