"""Layers with compressed entries (DeepSeek V4): two key streams under one softmax (M17).

The attention modules append their entries to the keys of a sliding window, `[B, 1, S + E, D]`, and
a bias `[B, 1, T, E]` of the entries to the mask of the step (none where every query sees all).
`EntryMask` is that mask without its values: the layer's own keys are served by a window, and the
entries by their numbers or as lists of selected ones. Other modules evaluate it like any mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from attnlib.integrations.transformers.batch_plan import BatchPlan, run_layer
from attnlib.integrations.transformers.layers import Call, layer_for
from attnlib.integrations.transformers.mask_kinds import is_plain_window
from attnlib.integrations.transformers.mask_tensor import EntryMask
from attnlib.integrations.transformers.pages import token_pages
from attnlib.integrations.transformers.step_batches import paged_plan
from attnlib.metadata.compressed import CompressedKeys, EntryBatch
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection, SelectedKeys

__all__ = ["EntryMask", "attend_two_streams"]


def attend_two_streams(call: Call, mask: EntryMask) -> torch.Tensor | None:
    """Attention to own keys and entries, `[B, T, Hq, Dv]`; None if no kernel argument expresses the
    mask, which must then be evaluated.

    Args:
        call: the attention call, whose keys end with the entries.
        mask: the extended mask.
    """
    step, count = mask.step, mask.num_entries
    compressor, rows = getattr(call.module, "compressor", None), step.rows()
    if rows is not None and not rows.real.all():
        # Entries also compress padding tokens. Their states, which kernels leave at 0, then reach
        # the outputs of tokens.
        return None
    width = call.key.shape[2] - count
    if compressor is None or step.kv_length != width or not is_plain_window(step):
        return None
    indexer = getattr(compressor, "indexer", None)
    selection = None
    if indexer is not None:
        selection = KeySelection(max_blocks=int(indexer.index_topk))
    own = replace(call, key=call.key[:, :, :width], value=call.value[:, :, :width])
    cache, ratio = token_pages(own.key, own.value)
    entry_cache, entry_ratio = token_pages(call.key[:, :, width:], call.value[:, :, width:])
    pattern = step.pattern
    assert pattern is not None  # of a plain window
    spec = own.spec(
        block_size=1,
        sliding_window=None if pattern.window.left is None else pattern.window.left + 1,
        use_mla=cache.values_alias_keys and entry_cache.values_alias_keys,
        compressed_entries=CompressedEntries(
            compress_rate=int(compressor.compress_rate), block_size=1, selection=selection
        ),
    )
    layer = layer_for(own, spec)
    key = ("entries", ratio, layer.backend, spec, call.query.device)
    if key not in step.plans:
        step.plans[key] = paged_plan(layer, step, ratio, call.query.device)
    plan: BatchPlan = step.plans[key]
    compressed = _entries_of(call, mask, entry_ratio, spec.compressed_entries)
    return run_layer(
        layer,
        plan,
        own.query,
        None,
        None,
        cache,
        compressed_keys=CompressedKeys(entry_cache, *compressed),
    )


def _entries_of(
    call: Call, mask: EntryMask, ratio: int, form: CompressedEntries | None
) -> tuple[EntryBatch, SelectedKeys | None]:
    """The visible entries of all queries, and the lists of selected ones."""
    (batch, _, queries, _), count = call.query.shape, mask.num_entries
    device = call.query.device
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    rows = torch.arange(batch, dtype=torch.int32, device=device) * ratio
    table = (rows[:, None] + numbers).repeat_interleave(queries, dim=0)
    counts = torch.full((batch * queries,), count, dtype=torch.int32, device=device)
    lists: torch.Tensor | None = None
    assert form is not None
    if form.selection is not None:
        most = min(count, form.selection.max_blocks)
        lists = numbers.expand(batch * queries, count)
        if mask.bias is not None:
            visible = mask.bias.reshape(batch * queries, count) == 0
            lists = lists.masked_fill(~visible, -1)
        lists = lists.topk(most, dim=1).values[:, None] if count > most else lists[:, None]
    elif mask.bias is not None:  # the entries up to the query
        counts = (mask.bias.reshape(batch * queries, count) == 0).sum(1).to(torch.int32)
    starts = torch.arange(len(counts) + 1, dtype=torch.int32, device=device)
    entries = EntryBatch(form.compress_rate, starts, counts, table, count)
    return entries, None if lists is None else SelectedKeys(cast(Any, lists).contiguous())
