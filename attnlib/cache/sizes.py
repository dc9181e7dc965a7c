"""The sizes of a cache, which follow from its views."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlib.kv_dtype import KVFormat
from attnlib.kv_rotation import KVRotation
from attnlib.ops.latent import values_are_prefix

__all__ = ["CacheSizes"]


class CacheSizes:
    """Sizes of `PagedKVCache`."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    page_formats: tuple[KVFormat | None, KVFormat | None]
    layout: str | None
    rotation: KVRotation | None

    if TYPE_CHECKING:

        @property
        def block_views(self) -> tuple[torch.Tensor, ...]: ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool (B)."""
        return self.key_cache.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in one block (N)."""
        return self.key_cache.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads (Hkv)."""
        return self.key_cache.shape[2]

    @property
    def head_size(self) -> int:
        """Elements of one key head (D)."""
        stored, found = self.key_cache.shape[3], self.page_formats[0]
        return stored if found is None else found.head_size(stored)

    @property
    def head_size_v(self) -> int:
        """Elements of one value head (Dv)."""
        stored, found = self.value_cache.shape[3], self.page_formats[1]
        return stored if found is None else found.head_size(stored)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored elements."""
        return self.key_cache.dtype

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self.key_cache.device

    @property
    def num_slots(self) -> int:
        """Capacity in tokens: B * N."""
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks: elements, and scales in the page. Aliased values count once."""
        views = self.block_views[:1] if self.values_alias_keys else self.block_views
        return sum(view.numel() * view.element_size() for view in views)

    @property
    def values_alias_keys(self) -> bool:
        """True if the values are a prefix of the keys (P10): writing the keys writes both."""
        return values_are_prefix(self.key_cache, self.value_cache)

    @property
    def page_format(self) -> KVFormat | None:
        """The format with scales in the page of the keys, else of the values; None for caches
        without scales in the page."""
        return self.page_formats[0] or self.page_formats[1]

    @property
    def format_name(self) -> str:
        """The formats of keys and values, once where they are equal."""
        views = zip((self.key_cache, self.value_cache), self.page_formats, strict=True)
        names = [one.name if one else str(x.dtype).removeprefix("torch.") for x, one in views]
        return ",".join(dict.fromkeys(names))

    def __repr__(self) -> str:
        return (
            f"PagedKVCache({self.num_blocks} blocks x {self.block_size} tokens x "
            f"{self.num_kv_heads} heads x {self.head_size}"
            f"{'' if self.head_size_v == self.head_size else f'/{self.head_size_v}'}, "
            f"{self.format_name}, "
            f"{f'{self.rotation}, ' if self.rotation else ''}"
            f"{self.layout or 'unknown layout'}, "
            f"{self.device})"
        )
