"""Compressed entries for measurements, made on the device (M17)."""

from __future__ import annotations

import torch

from attnlib.bench.key_lists import spread_lists
from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.compressed import CompressedKeys, EntryBatch
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec

__all__ = ["own_and_entries", "random_entries"]


def random_entries(
    spec: AttentionSpec, common: CommonAttentionMetadata, copies: int, draw: torch.Generator
) -> list[CompressedKeys]:
    """Random entries of a batch, whose blocks are in random order, and lists of visible ones.

    Args:
        spec: of the layer.
        common: the batch, with lengths on the host.
        copies: caches of entries, each with lists of its own.
        draw: on the device of the batch.
    """
    form, device = spec.compressed_entries, common.seq_lens.device
    assert form is not None and common.seq_lens_cpu is not None
    counts = (common.seq_lens_cpu // form.compress_rate).tolist()
    blocks = [-(-count // form.block_size) for count in counts]
    order = torch.randperm(sum(blocks), generator=draw, device=device).int()
    table = torch.zeros(common.num_reqs, max(1, *blocks), dtype=torch.int32, device=device)
    first = 0
    for request, count in enumerate(blocks):
        table[request, :count] = order[first : first + count]
        first += count
    batch = EntryBatch.build(common, table, form.compress_rate)
    plain = spec.replace(compressed_entries=None, block_size=form.block_size)
    found = []
    for _ in range(copies):
        cache = PagedKVCache.allocate(plain, max(1, sum(blocks)), device)
        views = cache.block_views[:1] if cache.values_alias_keys else cache.block_views
        for view in views:
            view.copy_(torch.randn(view.shape, generator=draw, device=device, dtype=spec.dtype))
        found.append(CompressedKeys(cache, batch, _lists(spec, batch)))
    return found


def own_and_entries(
    key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, given: CompressedKeys, row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values that a query sees: own ones of its window, then entries.

    Args:
        key, value: `[s, Hkv, D]` and `[s, Hkv, Dv]`, own ones up to the query's.
        spec: of the layer.
        given: the entries.
        row: the query token.
    """
    if spec.sliding_window is not None:
        key, value = key[-spec.sliding_window :], value[-spec.sliding_window :]
    batch, cache = given.batch, given.cache
    numbers = torch.arange(int(batch.num_entries[row]), device=key.device)
    if given.selected is not None:
        numbers = numbers[torch.isin(numbers, given.selected.indices[row, 0].long())]
    blocks = batch.block_table[row].long()[numbers // cache.block_size]
    offsets = numbers % cache.block_size
    keys = torch.cat((key, cache.key_cache[blocks, offsets]))
    return keys, torch.cat((value, cache.value_cache[blocks, offsets]))


def _lists(spec: AttentionSpec, batch: EntryBatch) -> SelectedKeys | None:
    form = spec.compressed_entries
    if form is None or form.selection is None:
        return None
    lengths = batch.num_entries.long().clamp(min=1)
    return SelectedKeys(spread_lists(1, form.selection, lengths))
