"""Attention of many short queries over the paged cache.

A decode on a CPU is bound by reading K and V once. Requests of similar length go to fused attention
together (see `decode_group`); a request whose blocks are consecutive in memory is read in place.
Requests that fused attention does not support are computed as in `paged_prefill`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.batch import Request, clear_tail, list_requests, on_host
from attnlib.ops.torch.decode_group import attend_group, group_requests
from attnlib.ops.torch.fused import can_fuse
from attnlib.ops.torch.gather import Scratch, consecutive_blocks
from attnlib.ops.torch.page_formats import gather_pages
from attnlib.ops.torch.paged import PagedInputs, attend_paged, visible_range
from attnlib.ops.torch.quant import compute_dtype

__all__ = ["paged_decode"]

# Largest query length that is batched; longer queries keep the fused kernel busy on their own.
_MAX_BATCHED_QUERY_LEN = 8


@torch.no_grad()
@without_autocast
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor,
    lse: Tensor | None = None,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    batch_invariant: bool = False,
    num_splits: int | None = None,
    workspace: Tensor | None = None,
    counters: Tensor | None = None,
    kernels: str = "auto",
) -> None:
    """Compute what `paged_prefill` computes, faster for queries of a few tokens on a CPU.

    Args:
        num_splits: ignored; see `attnlib.ops.triton.paged_decode`.
        workspace: ignored; likewise.

    The other arguments are those of `paged_prefill`.
    """
    starts, lengths = on_host(query_start_loc, query_start_loc_cpu), on_host(seq_lens, seq_lens_cpu)
    cache = gather_pages(key_cache, value_cache, block_table, lengths, params)
    key_cache, value_cache, block_table, params = cache
    inputs = PagedInputs(query, key_cache, value_cache, block_table, params)
    dtype = compute_dtype(query, key_cache, inputs.k_factor, inputs.v_factor)
    batchable: list[Request] = []
    others = list_requests(starts, lengths, params.causal)
    if not batch_invariant and can_fuse(query.device, dtype, params):
        batchable = [request for request in others if _is_batchable(request, inputs)]
        batched = {request.index for request in batchable}
        others = [request for request in others if request.index not in batched]
    attend_paged(others, inputs, out, lse, batch_invariant)
    scratch = Scratch(query.device)
    for group in group_requests(batchable, inputs):
        attend_group(group, inputs, dtype, scratch, out, lse)
    clear_tail(out, lse, starts)


def _is_batchable(request: Request, inputs: PagedInputs) -> bool:
    """Whether the query is short, sees at least one key, and its blocks are not consecutive."""
    start, end = visible_range(request, inputs.params)
    too_long = request.query_len > _MAX_BATCHED_QUERY_LEN
    if too_long or request.first_position < 0 or end <= start:
        return False
    blocks = inputs.blocks(request)
    return (
        consecutive_blocks(inputs.key_cache, blocks) is None
        or consecutive_blocks(inputs.value_cache, blocks) is None
    )
