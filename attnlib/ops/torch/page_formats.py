"""Reads of pages that hold their scales (M16), by the reference conversions of their formats."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnlib.kv_dtype import KVFormat, page_format
from attnlib.ops.params import AttentionParams

__all__ = ["gather_pages"]


def gather_pages(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    params: AttentionParams,
) -> tuple[Tensor, Tensor, Tensor, AttentionParams]:
    """A cache without scales in the page as it is; else the pages of a batch in float32.

    Args:
        key_cache, value_cache: `[B, N, Hkv, stored size]`.
        block_table: `[R, M]` int32.
        lengths: sequence length of each request, on the host.
        params: with the scales of the cache.

    Returns:
        (keys `[P, N, Hkv, D]`, values, block table, parameters), the last with scales of 1.
    """
    if not params.scales_in_page:
        return key_cache, value_cache, block_table, params
    num_blocks, block_size = key_cache.shape[:2]
    width = -(-max(lengths.tolist(), default=0) // block_size)
    table = block_table[:, :width]
    ends = lengths.to(table.device).unsqueeze(1)
    used = torch.arange(width, device=table.device) * block_size < ends
    # Entries past the end of a request may hold anything (P3).
    blocks = torch.where(used, table, 0).flatten().clamp(0, max(num_blocks - 1, 0)).long()
    keys = _real_values(key_cache, params.k_scale, params.k_format, blocks)
    values = _real_values(value_cache, params.v_scale, params.v_format, blocks)
    renumbered = torch.arange(blocks.numel(), dtype=torch.int32, device=table.device)
    dense = replace(params, k_scale=1.0, v_scale=1.0)
    return keys, values, renumbered.view(table.shape[0], width), dense


def _real_values(
    cache: Tensor, scales: float | Tensor, known: KVFormat | None, blocks: Tensor
) -> Tensor:
    """The real values of some blocks, float32. A side without scales in the page has none."""
    stored, elements = page_format(cache, scales, known), _blocks(cache, blocks)
    if stored is None or not isinstance(scales, Tensor):
        return elements.float()
    return stored.load(elements, _blocks(scales, blocks))


def _blocks(view: Tensor, blocks: Tensor) -> Tensor:
    """Blocks of a view; float8 is indexed as bytes, because not every device can index it."""
    raw = view.view(torch.uint8) if view.element_size() == 1 else view
    return raw.index_select(0, blocks).view(view.dtype)
