"""Views of contiguous keys and values as a paged cache, without a copy.

transformers stores `[B, H, S, D]`. With one token per block, every token of every batch row is a
block of one strided view: block b * ratio + s is token s of row b, where ratio is the distance
between rows in tokens. A block table can then start anywhere and skip tokens, as padding requires.
"""

from __future__ import annotations

import numpy as np
import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.integrations.transformers.cache_buffers import capacity_of

__all__ = ["token_pages", "token_table"]


def token_pages(key: torch.Tensor, value: torch.Tensor) -> tuple[PagedKVCache, int]:
    """A cache of one-token blocks over `key` and `value`.

    Keys and values are copied if block ids cannot express their strides: rows that are not a whole
    number of tokens apart, a head that is not contiguous, keys and values that disagree.

    Views of a growing buffer (`growing_cache`) become a cache over all of it.

    Args:
        key: `[B, Hkv, S, D]`, any strides.
        value: `[B, Hkv, S, Dv]`, any strides.

    Returns:
        (the cache, the distance between two rows in block ids).
    """
    capacity = capacity_of(key, value)
    if capacity is not None:
        # All of the buffers, so that the views of later tokens have the same shape.
        rows = capacity if key.shape[0] == 1 else key.stride(0) // key.stride(2)
        pages = (_as_pages(x, rows, capacity) for x in (key, value))
        return PagedKVCache(*pages), rows
    ratio = _row_distance(key)
    if ratio is None or _row_distance(value) != ratio:
        key, value = key.contiguous(), value.contiguous()
        ratio = _row_distance(key) or 1
    tokens = key.shape[2]
    return PagedKVCache(_as_pages(key, ratio, tokens), _as_pages(value, ratio, tokens)), ratio


def token_table(keys: np.ndarray, ratio: int) -> np.ndarray:
    """The block table of a padded batch.

    Args:
        keys: `[B, width]` bool, True for tokens.
        ratio: distance between two rows in block ids.

    Returns:
        `[B, max_len]` int32 block ids of the tokens in order; -1 past the end of a row.
    """
    counts = keys.sum(1)
    table = np.full((keys.shape[0], int(counts.max(initial=0))), -1, dtype=np.int32)
    rows, columns = np.nonzero(keys)
    positions = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    table[rows, positions] = rows * ratio + columns
    return table


def _row_distance(tensor: torch.Tensor) -> int | None:
    """Distance between two batch rows in tokens, or None if it is not a whole number."""
    batch, _, tokens, head_size = tensor.shape
    row, _, token, element = tensor.stride()
    if head_size > 1 and element != 1:
        return None
    if tokens > 1 and token < 1:
        return None
    if batch == 1:
        return max(tokens, 1)
    if tokens == 1:
        return 1
    return row // token if row > 0 and row % token == 0 else None


def _as_pages(tensor: torch.Tensor, ratio: int, tokens: int) -> torch.Tensor:
    batch, heads, _, head_size = tensor.shape
    row, head, token, element = tensor.stride()
    block = row if tokens == 1 else token  # a dimension of size 1 may have any stride
    blocks = (batch - 1) * ratio + tokens
    return tensor.as_strided((blocks, 1, heads, head_size), (block, block, head, element))
