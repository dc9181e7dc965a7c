"""The sizes and dtypes of an attention layer, as one value that tiles, splits and kernels follow
from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.kv_dtype import KVFormat, page_format
from attnlib.ops.checks import vector_elements
from attnlib.ops.latent import values_are_prefix
from attnlib.ops.params import AttentionParams

__all__ = ["LayerShape"]


class LayerShape(NamedTuple):
    """The sizes and dtypes of a layer: hashable, without tensors and without a batch.

    Attributes:
        num_heads: Hq, query heads.
        num_kv_heads: Hkv, heads of keys and values.
        head_size: D, elements of a query and of a key.
        head_size_v: Dv, elements of a value, also where pages store them in fewer bytes (M16).
        query_dtype: dtype of queries and outputs.
        cache_dtype: dtype of the stored keys and values.
        block_size: N, tokens of a page; 0 for packed keys without pages.
        score_tiles: float32 tiles of `[rows, keys]` that a kernel holds besides the scores: a query
            bias, and the lookups of a score function.
        latent: the values are a prefix of the keys, in the same memory (P10).
        aligned: every key starts on a 16-byte boundary.
        page_format: the format of a cache with scales in its pages (M16); None for others.
        value_format: that of the values, where it is another one; else None.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int = 0
    score_tiles: int = 0
    latent: bool = False
    aligned: bool = True
    page_format: KVFormat | None = None
    value_format: KVFormat | None = None

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> LayerShape:
        """The shape of the layer that makes a call.

        Args:
            query: `[T, Hq, D]`.
            key: `[B, N, Hkv, D]` in pages, or `[Tk, Hkv, D]`.
            value: the same form, with Dv.
            params: of the call.

        Raises:
            ContractError: keys whose last dimension is not dense, pages of no known format, or
                pages in which one side has scales.
        """
        stored, in_pages = page_format(key, params.k_scale, params.k_format), key.dim() == 4
        values = page_format(value, params.v_scale, params.v_format)
        if (stored is None) != (values is None):
            raise ContractError(
                "the pages of this cache hold scales of keys or of values only, which the Triton "
                "kernels do not read: use backend='torch'",
                rule="M16",
            )
        size_v = value.shape[-1] if values is None else values.head_size(value.shape[-1])
        return cls(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[-2],
            head_size=query.shape[2],
            head_size_v=size_v,
            query_dtype=query.dtype,
            cache_dtype=key.dtype,
            block_size=key.shape[1] if in_pages else 0,
            score_tiles=params.count_score_tiles(),
            latent=in_pages and values_are_prefix(key, value),
            aligned=vector_elements("key", key) > 1,
            page_format=stored,
            value_format=None if values == stored else values,
        )

    @property
    def group(self) -> int:
        """Query heads per KV head; those of no KV head as of one."""
        return self.num_heads // max(1, self.num_kv_heads)

    @property
    def head_sizes(self) -> tuple[int, int]:
        """(D, Dv)."""
        return self.head_size, self.head_size_v

    @property
    def value_dtype(self) -> torch.dtype:
        """Dtype of the stored values."""
        return self.cache_dtype if self.value_format is None else self.value_format.dtype

    @property
    def element_bytes(self) -> tuple[int, int]:
        """Bytes of an element of the queries and of the cache."""
        return self.query_dtype.itemsize, self.cache_dtype.itemsize
