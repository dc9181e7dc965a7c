"""Attention of many short queries over the paged cache.

On a CPU a decode is a matter of reading K and V once. Requests of like length go to fused attention together (see
`decode_group`), and a request whose pages follow each other in memory is read in place. What fused attention cannot say
goes the way of `paged_prefill`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.torch.batch import Request, clear_tail, list_requests, on_host
from attnlib.ops.torch.decode_group import attend_group, group_requests
from attnlib.ops.torch.fused import can_fuse
from attnlib.ops.torch.gather import Scratch, contiguous_run
from attnlib.ops.torch.paged import PagedInputs, attend_paged, visible_range
from attnlib.ops.torch.quant import compute_dtype, head_factor
from attnlib.ops.torch.rules import ScoreRules

__all__ = ["paged_decode"]

# Rows per request up to which requests are batched; longer ones fill the kernel alone.
_BATCHED_ROWS = 8


@torch.no_grad()
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool | Tensor = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk_size: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_bias: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    out: Tensor,
    lse: Tensor | None = None,
    num_splits: int | None = None,
    workspace: Tensor | None = None,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """As `paged_prefill`, and right for any batch; quick on a CPU for queries of a few tokens.

    Args:
        num_splits: how often to split the keys. Plain torch never splits them, and the answer would be the same.
        workspace: scratch memory. Not needed here.

    The others are as in `paged_prefill`.
    """
    starts, lengths = on_host(query_start_loc, query_start_loc_cpu), on_host(seq_lens, seq_lens_cpu)
    rules = ScoreRules(scale, logits_soft_cap, alibi_slopes, window, attention_chunk_size, sinks)
    inputs = PagedInputs(
        query,
        key_cache,
        value_cache,
        block_table,
        query_bias,
        head_factor(k_scale),
        head_factor(v_scale),
    )
    dtype = compute_dtype(query, key_cache, inputs.k_factor, inputs.v_factor)
    batchable: list[Request] = []
    others = list_requests(starts, lengths, causal)
    if not batch_invariant and can_fuse(query.device, dtype, logits_soft_cap):
        batchable = [request for request in others if _is_batchable(request, inputs, rules)]
        taken = {request.index for request in batchable}
        others = [request for request in others if request.index not in taken]
    attend_paged(others, inputs, rules, out, lse, batch_invariant)
    scratch = Scratch(query.device)
    for group in group_requests(batchable, inputs, rules):
        attend_group(group, inputs, rules, dtype, scratch, out, lse)
    clear_tail(out, lse, starts)


def _is_batchable(request: Request, inputs: PagedInputs, rules: ScoreRules) -> bool:
    """Short, with something to see, and not better read in place."""
    start, end = visible_range(request, rules)
    if request.query_len > _BATCHED_ROWS or request.first_position < 0 or end <= start:
        return False
    blocks = inputs.blocks(request, rules)
    return (
        contiguous_run(inputs.key_cache, blocks) is None
        or contiguous_run(inputs.value_cache, blocks) is None
    )
