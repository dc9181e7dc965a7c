"""Lists of selected keys for measurements, made on the device (M11)."""

from __future__ import annotations

import torch

from attnlib.sparse.key_selection import KeySelection, SelectedKeys
from attnlib.testing.batch_spec import BatchSpec

__all__ = ["random_lists", "selected_mask", "spread_lists"]


def spread_lists(heads: int, selection: KeySelection, lengths: torch.Tensor) -> torch.Tensor:
    """Distinct random blocks over all visible keys, always with the query's own, in random order.

    Args:
        heads: lists per query token (H).
        selection: the form of the lists.
        lengths: `[L]` int64, the visible keys of each list.

    Returns:
        `[L, H, max_blocks]` int32.
    """
    device, entries = lengths.device, selection.max_blocks
    count = -(-lengths // selection.block_size)
    # Equal distances and a random start give distinct entries without sorting.
    step = ((count - 1) // entries).clamp(min=1)[:, None, None]
    start = (torch.rand(len(lengths), heads, 1, device=device) * step).long()
    found = torch.arange(entries, device=device) * step + start
    own = (count - 1)[:, None, None]
    found[..., -1:] = own
    found = found.where(found <= own, -1)
    others = found[..., :-1]
    others[others == own] = -1
    order = torch.rand(found.shape, device=device).argsort(-1)
    return found.gather(-1, order).int()


def random_lists(
    selection: KeySelection,
    batch: BatchSpec,
    num_heads: int,
    num_kv_heads: int,
    device: torch.device,
) -> SelectedKeys:
    """`spread_lists` of a batch, one list for each query token.

    Args:
        selection: the form of the lists.
        batch: the request lengths.
        num_heads, num_kv_heads: Hq and Hkv.
        device: where to make them.
    """
    lengths = [
        torch.arange(seq_len - query_len + 1, seq_len + 1, device=device)
        for query_len, seq_len in batch.lengths
    ]
    heads = selection.num_lists_heads(num_heads, num_kv_heads)
    return SelectedKeys(spread_lists(heads, selection, torch.cat(lengths)))


def selected_mask(
    selected: SelectedKeys, selection: KeySelection, row: int, num_heads: int, num_keys: int
) -> torch.Tensor:
    """The keys that the lists of query token `row` select, `[Hq, 1, num_keys]` bool."""
    lists = selected.indices[row].long()
    blocks = torch.arange(num_keys, device=lists.device) // selection.block_size
    chosen = torch.stack([torch.isin(blocks, entries) for entries in lists])
    return chosen[:, None].repeat_interleave(num_heads // len(lists), dim=0)
