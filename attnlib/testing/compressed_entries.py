"""Compressed entries for the conformance suite, and attention to two key streams (M17).

The expected result is computed request by request, with one softmax over the scores of both
streams. It shares no code with a backend, which may merge two results by their LSEs.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.compressed import CompressedKeys, EntryBatch
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection, SelectedKeys
from attnlib.testing.layouts import poison_value
from attnlib.testing.oracle import gather_tokens, visible_keys

if TYPE_CHECKING:
    from attnlib.testing.materialized_case import MaterializedCase

__all__ = ["Entries", "entries_of", "expected_result", "make_entries"]

_SCALE = 0.5
"""Scale of an fp8 cache of entries, other than that of the layer's own keys."""


def entries_of(fields: tuple[int, int, int] | None) -> CompressedEntries | None:
    """The compressed entries of a case: (compress_rate, block_size, max_selected)."""
    if fields is None:
        return None
    rate, block_size, most = fields
    selection = KeySelection(max_blocks=most) if most else None
    return CompressedEntries(compress_rate=rate, block_size=block_size, selection=selection)


@dataclass(frozen=True)
class Entries:
    """The entries of a step.

    Attributes:
        cache: their cache. Entries that no query sees hold poison.
        block_table: [R, m] int32; entries of blocks that no query sees are invalid.
        masks: per request the visible entries of each query, [query_len, entries] bool.
        selected: the lists, or None.
    """

    cache: PagedKVCache
    block_table: torch.Tensor
    masks: tuple[torch.Tensor, ...]
    selected: SelectedKeys | None

    def of_call(self, step: MaterializedCase) -> CompressedKeys:
        """The argument of a layer call."""
        form = step.spec.compressed_entries
        assert form is not None
        batch = EntryBatch.build(step.common(), self.block_table, form.compress_rate)
        return CompressedKeys(self.cache, batch, self.selected)


def make_entries(step: MaterializedCase, device: torch.device | str) -> Entries:
    """Random entries and lists for a step."""
    case, form = step.case, step.spec.compressed_entries
    assert form is not None
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed + 1)
    batch, rate, size = case.batch_spec, form.compress_rate, form.block_size
    counts = [seq_len // rate for seq_len in batch.seq_lens]
    blocks = [-(-count // size) for count in counts]
    order = list(range(sum(blocks) + 2))
    rng.shuffle(order)
    table = torch.full((batch.num_reqs, max([1, *blocks]) + 1), 1 << 30, dtype=torch.int32)
    spec = step.spec.replace(block_size=size, compressed_entries=None, kv_cache_layout=None)
    cache = PagedKVCache.allocate(spec, len(order), "cpu")
    raw, values = cache.key_cache, cache.value_cache
    stored = (raw,) if cache.values_alias_keys else (raw, values)
    for part in stored:
        part.fill_(poison_value(case.dimensions.cache_dtype, case.poison))
    masks, lists = [], []
    for request, (query_len, seq_len) in enumerate(batch.lengths):
        count = counts[request]
        mask = torch.zeros(query_len, count, dtype=torch.bool)
        for i in range(query_len):
            visible = (seq_len - query_len + i + 1) // rate
            chosen = list(range(visible))
            if form.selection is not None:
                most = form.selection.max_blocks
                candidates = list(range(count + 2))  # also hidden ones and past the end
                rng.shuffle(candidates)
                picked = candidates[: rng.choice([most, most, max(most - 1, 1)])]
                lists.append([[*picked, *[-1] * (most - len(picked))]])
                rng.shuffle(lists[-1][0])
                chosen = [entry for entry in picked if entry < visible]
            mask[i, chosen] = True
        masks.append(mask)
        mine = [order.pop() for _ in range(blocks[request])]
        for entry in mask.any(dim=0).nonzero()[:, 0].tolist():
            block = mine[entry // size]
            table[request, entry // size] = block
            for part in stored:
                new = torch.randn(part.shape[2:], generator=generator)
                part[block, entry % size] = new.to(part.dtype)
    selected = None
    if form.selection is not None:
        shape = (len(lists), 1, form.selection.max_blocks)
        selected = SelectedKeys(torch.tensor(lists, dtype=torch.int32).view(shape).to(device))
    scale = _SCALE if step.spec.is_kv_quantized else 1.0
    keys = raw.to(device)
    values = keys[..., : spec.head_size_v] if cache.values_alias_keys else values.to(device)
    moved = PagedKVCache.from_views(keys, values, k_scale=scale, v_scale=scale)
    return Entries(moved, table.to(device), tuple(masks), selected)


def expected_result(
    step: MaterializedCase, entries: Entries, precision: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[T, Hq, Dv]` and LSE `[T, Hq]` of a step, computed in `precision`."""
    inputs, params, spec = step.inputs, step.params, step.spec
    form, statistics = spec.compressed_entries, torch.float64
    assert form is not None
    if precision is not torch.float64:
        statistics = torch.float32  # M8
    query, starts = inputs.query, inputs.query_start_loc.tolist()
    out = query.new_zeros((*query.shape[:2], spec.head_size_v), dtype=precision)
    lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float64)
    table = entries.block_table
    theirs = entries.cache
    streams = (
        ((inputs.cache.key, params.k_scale), (inputs.cache.value, params.v_scale)),
        ((theirs.key_cache, theirs.k_scale), (theirs.value_cache, theirs.v_scale)),
    )
    for request, seq_len in enumerate(inputs.seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        q = query[rows].to(precision).transpose(0, 1)
        count = q.shape[1]
        positions = seq_len - count + torch.arange(count, device=query.device)
        mask = entries.masks[request].to(query.device)
        hidden = (~visible_keys(positions, seq_len, params), ~mask)
        row = torch.where(table[request] < entries.cache.num_blocks, table[request], 0)
        tables, lengths = (inputs.block_table[request], row), (seq_len, mask.shape[1])
        logits, values = [], []
        for stream, not_seen, blocks, length in zip(streams, hidden, tables, lengths, strict=True):
            k, v = (
                _heads(gather_tokens(cache, blocks, length), scale, spec.num_heads, precision)
                for cache, scale in stream
            )
            unseen = not_seen.all(dim=0)  # may hold anything
            k, v = (x.masked_fill(unseen[None, :, None], 0.0) for x in (k, v))
            scores = (params.scale * (q @ k.transpose(1, 2))).to(statistics)
            if params.logits_soft_cap > 0:
                scores = params.logits_soft_cap * torch.tanh(scores / params.logits_soft_cap)
            logits.append(scores.masked_fill(not_seen, -math.inf))
            values.append(v)
        both = torch.cat(logits, dim=2)
        denominator = both
        if params.sinks is not None:  # once
            sink = params.sinks.to(both.dtype)[:, None, None].expand(*both.shape[:2], 1)
            denominator = torch.cat((both, sink), dim=2)
        if denominator.shape[2]:
            logs = torch.logsumexp(denominator, dim=2)
            weights = torch.exp(both - logs.masked_fill(logs == -math.inf, 0.0)[:, :, None])
            out[rows] = (weights.to(precision) @ torch.cat(values, dim=1)).transpose(0, 1)
            lse[rows] = logs.transpose(0, 1).double()
    return out, lse


def _heads(
    tokens: torch.Tensor, scale: float | torch.Tensor, num_heads: int, precision: torch.dtype
) -> torch.Tensor:
    """`[Hq, s, D]` from stored tokens `[s, Hkv, D]`."""
    factor = torch.as_tensor(scale, dtype=torch.float64, device=tokens.device)
    real = tokens.to(precision) * factor.expand(tokens.shape[1]).to(precision)[:, None]
    return real.repeat_interleave(num_heads // tokens.shape[1], dim=1).transpose(0, 1)
