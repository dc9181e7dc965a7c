"""Attention of many short queries over the paged cache.

A decode on a CPU is bound by reading K and V once. Requests whose keys lie in a few runs of
consecutive blocks are read in place (`decode_runs`); others of similar length are gathered, and go
to fused attention together (`decode_group`). Requests that fused attention does not support are
computed as in `paged_prefill`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.batch import clear_tail, on_host
from attnlib.ops.torch.decode_group import attend_group
from attnlib.ops.torch.decode_plan import DecodePlan, plan_of
from attnlib.ops.torch.gather import Scratch
from attnlib.ops.torch.page_formats import gather_pages
from attnlib.ops.torch.paged import PagedInputs, attend_paged
from attnlib.ops.torch.quant import compute_dtype
from attnlib.ops.torch.token_sinks import adds_token_sinks

__all__ = ["paged_decode"]


@torch.no_grad()
@without_autocast
@adds_token_sinks
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
    plans: dict[Any, DecodePlan] | None = None,
) -> None:
    """Compute what `paged_prefill` computes, faster for queries of a few tokens on a CPU.

    Args:
        num_splits: ignored; see `attnlib.ops.triton.paged_decode`.
        workspace: ignored; likewise.
        plans: what calls over this batch have prepared, for those of other layers; added to.

    The other arguments are those of `paged_prefill`.
    """
    starts, lengths = on_host(query_start_loc, query_start_loc_cpu), on_host(seq_lens, seq_lens_cpu)
    cache = gather_pages(key_cache, value_cache, block_table, lengths, params)
    if cache[2] is not block_table:
        plans = None
    inputs = PagedInputs(query, *cache)
    dtype = compute_dtype(query, inputs.key_cache, inputs.k_factor, inputs.v_factor)
    plan = plan_of(inputs, starts, lengths, dtype, batch_invariant, plans)
    attend_paged(plan.others, inputs, out, lse, batch_invariant)
    if plan.runs is not None:
        plan.runs.attend(inputs, dtype, out, lse)
    scratch = Scratch(query.device)
    for group in plan.groups:
        attend_group(group, inputs, dtype, scratch, out, lse)
    clear_tail(out, lse, starts)
