"""Contiguous keys and values seen as attnlib's paged cache, without copying them.

transformers keeps `[B, H, S, D]`. With one token per block, every token of every batch row is a block of one strided view: block b * ratio + s is
token s of row b, where ratio is the distance between rows counted in tokens. A block table can then start anywhere and leave tokens out, which is
all that padding needs.
"""

from __future__ import annotations

import numpy as np
import torch

from attnlib.cache.storage import PagedKVCache

__all__ = ["token_pages", "token_table"]


def token_pages(key: torch.Tensor, value: torch.Tensor) -> tuple[PagedKVCache, int]:
    """A cache of one-token blocks over `key` and `value`, and how many block ids lie between two rows.

    Args:
        key: `[B, Hkv, S, D]`, any strides.
        value: `[B, Hkv, S, Dv]`, any strides.

    Strides that no block id can express (rows that are no whole number of tokens apart, a head that is not contiguous, keys and values that
    disagree) are copied into ones that can be.
    """
    ratio = _row_distance(key)
    if ratio is None or _row_distance(value) != ratio:
        key, value = key.contiguous(), value.contiguous()
        ratio = _row_distance(key) or 1
    return PagedKVCache(_as_pages(key, ratio), _as_pages(value, ratio)), ratio


def token_table(keys: np.ndarray, ratio: int) -> np.ndarray:
    """`[B, max_len]` int32 block ids of the tokens that `keys` `[B, width]` marks, in order, the rest filled with -1."""
    counts = keys.sum(1)
    table = np.full((keys.shape[0], int(counts.max(initial=0))), -1, dtype=np.int32)
    rows, columns = np.nonzero(keys)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    table[rows, places] = rows * ratio + columns
    return table


def _row_distance(tensor: torch.Tensor) -> int | None:
    """Tokens between two batch rows, or None where block ids cannot say it."""
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


def _as_pages(tensor: torch.Tensor, ratio: int) -> torch.Tensor:
    batch, heads, tokens, head_size = tensor.shape
    row, head, token, element = tensor.stride()
    block = row if tokens == 1 else token  # a dimension of one entry may carry any stride
    blocks = (batch - 1) * ratio + tokens
    return tensor.as_strided((blocks, 1, heads, head_size), (block, block, head, element))
