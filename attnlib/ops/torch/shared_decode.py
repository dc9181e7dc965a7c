"""Decode of requests that share prefixes, with torch operations: the items in the order and with
the splits of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.params import AttentionParams
from attnlib.ops.shared_decode import ITEM_FIELDS, SEGMENT_FIELDS, DecodeItems
from attnlib.ops.torch.softmax import merge_weights

__all__ = ["shared_decode"]


@torch.no_grad()
@without_autocast
def shared_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    items: DecodeItems,
    params: AttentionParams,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> bool:
    """Attention of one query token per request, whose keys `items` lists.

    Args:
        query: `[T, Hq, D]`.
        key_cache: `[B, N, Hkv, D]`.
        value_cache: `[B, N, Hkv, Dv]`.
        block_table: `[R, M]` int32.
        items: of the batch; at most T tokens.
        params: scale, soft cap and sinks count.
        out: `[T, Hq, Dv]`, written; rows without a request become 0 (M6).
        lse: `[T, Hq]` float32, written when given (M5).
        workspace: not used.

    Returns:
        True: all tensors are served.
    """
    heads, head_size_v = query.shape[1], value_cache.shape[3]
    group = heads // key_cache.shape[2]
    partial_out = query.new_zeros(items.num_partials, heads, head_size_v, dtype=torch.float32)
    partial_lse = partial_out.new_full((items.num_partials, heads), -torch.inf)
    tokens, tile_keys = items.tokens.long(), items.tile_keys
    fields = items.items.view(-1, ITEM_FIELDS).tolist()
    segments = items.segments.view(-1, SEGMENT_FIELDS).tolist()
    for number, (position, end, item, segment) in enumerate(items.ranges.view(-1, 4).tolist()):
        while position < end:
            begin, tiles, first, members, partial, _, _, first_range = fields[item]
            stop = min(begin + tiles, end)
            rows = partial + (number - first_range) * members
            while position < stop:
                before, count, row, column, num_keys, place, seeing, _ = segments[segment]
                until = min(before + count, stop)
                keys, values = (
                    _keys(cache, block_table[row, column:], num_keys).float()
                    for cache in (key_cache, value_cache)
                )
                tile = torch.arange(num_keys, device=query.device) // tile_keys + before
                own = (tile >= position) & (tile < until)
                found = tokens[first + place : first + place + seeing]
                state = _attend(query[found], keys[own], values[own], params, group)
                target = slice(rows + place, rows + place + seeing)
                _add(partial_out[target], partial_lse[target], *state)
                position = until
                segment += position == before + count
            item += 1
    _merge(partial_out, partial_lse, items, params, out, lse)
    return True


def _keys(cache: Tensor, table: Tensor, count: int) -> Tensor:
    """The first `count` keys or values of a row of the block table."""
    blocks = table[: -(-count // cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)[:count]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams, group: int
) -> tuple[Tensor, Tensor]:
    """Output and LSE of queries that see all keys, in float32."""
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("thd,khd->thk", query.float(), keys) * params.scale
    cap = params.logits_soft_cap
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    return torch.einsum("thk,khd->thd", scores.softmax(-1), values), scores.logsumexp(-1)


def _add(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Add attention over other keys to partial results, in place."""
    (weights, more_weights), total = merge_weights(torch.stack([lse, more_lse]))
    out.copy_(weights.unsqueeze(-1) * out + more_weights.unsqueeze(-1) * more_out)
    lse.copy_(total)


def _merge(
    partial_out: Tensor,
    partial_lse: Tensor,
    items: DecodeItems,
    params: AttentionParams,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Merge the partial results of each token; a sink counts once (M4)."""
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    starts, rows = items.partial_starts.tolist(), items.partial_rows.long()
    for token in range(items.num_tokens):
        found = rows[starts[token] : starts[token + 1]]
        if not found.numel():
            continue
        states = partial_lse[found]
        if params.sinks is not None:
            states = torch.cat([states, params.sinks.float()[None]])
        weights, total = merge_weights(states)
        weights = weights[: found.numel()]
        out[token] = (weights.unsqueeze(-1) * partial_out[found]).sum(0).to(out.dtype)
        if lse is not None:
            lse[token] = total
