"""Decode of requests that share prefixes, with torch operations: the items in the order and with
the splits of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.shared_decode import ITEM_FIELDS, PRODUCT_ROWS, WHOLE_TILES, DecodeItems

__all__ = ["shared_decode"]


@torch.no_grad()
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
    partial_lse = torch.full((items.num_partials, heads), -torch.inf, device=query.device)
    tokens, tile_keys = items.tokens.long(), items.tile_keys
    total, per_range = items.header.tolist()
    fields = items.items.view(-1, ITEM_FIELDS).tolist()
    for number, first in enumerate(items.range_items.tolist()):
        position, item = number * per_range, first
        end = min(position + per_range, total)
        while position < end:
            before, tiles, row, column, num_keys, start, members, partial = fields[item]
            skipped, count = position - before, min(before + tiles, end) - position
            found = tokens[start : start + members] if members > 1 else torch.tensor([start])
            keys, values = (
                _keys(cache, block_table[row, column:], num_keys).float()
                for cache in (key_cache, value_cache)
            )
            split = position // per_range - before // per_range
            in_turn = tiles > WHOLE_TILES and members <= PRODUCT_ROWS // group
            consumers = 2 if in_turn else 1
            visited = torch.arange(skipped * tile_keys, (skipped + count) * tile_keys)
            visited = visited[visited < num_keys]
            for consumer in range(consumers):
                own = visited[(visited // tile_keys - skipped) % consumers == consumer]
                if own.numel():
                    rows = partial + (consumers * split + consumer) * members
                    state = _attend(query[found], keys[own], values[own], params, group)
                    partial_out[rows : rows + members] = state[0]
                    partial_lse[rows : rows + members] = state[1]
            position, item = position + count, item + 1
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


def _merge(
    partial_out: Tensor, partial_lse: Tensor, items: DecodeItems, params: AttentionParams,
    out: Tensor, lse: Tensor | None,
) -> None:  # fmt: skip
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
        total = states.logsumexp(0)
        if params.sinks is not None:
            total = torch.logaddexp(total, params.sinks.float())
        weights = torch.exp(states - total)
        out[token] = (weights.unsqueeze(-1) * partial_out[found]).sum(0).to(out.dtype)
        if lse is not None:
            lse[token] = total
