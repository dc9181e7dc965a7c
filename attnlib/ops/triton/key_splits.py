"""How many programs of a prefill share the keys of one query tile."""

from __future__ import annotations

from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.heuristics.splits import prefill_splits, visible_bound

__all__ = ["key_splits"]


def key_splits(call: AttentionCall, tile_tokens: int, blocks: int) -> int:
    """Programs that share the keys of a query tile of a call.

    Args:
        call: over pages.
        tile_tokens: query tokens of a tile.
        blocks: blocks of heads that a query tile has.
    """
    params, batch = call.params, call.batch
    bounds = batch.max_query_len, batch.max_seq_len
    causal = params.causal if isinstance(params.causal, bool) else False
    visible = visible_bound(*bounds, params.window, causal, params.attention_chunk_size)
    tiles = min(
        batch.num_reqs * -(-batch.max_query_len // tile_tokens),
        call.num_tokens // tile_tokens + batch.num_reqs,
    )
    return prefill_splits(tiles * blocks, batch.max_seq_len, visible, call.limits.num_sms)
