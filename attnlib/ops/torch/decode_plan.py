"""What the decodes of a batch share: the layers of a step have the same lengths and block table.

A plan is kept with the batch, and holds for calls with the values that it was made from: all of
them are compared, because tables and lengths may be written in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlib.ops.torch.batch import Request, list_requests
from attnlib.ops.torch.decode_group import Group, group_requests
from attnlib.ops.torch.decode_runs import Runs, runs_of_requests
from attnlib.ops.torch.fused import can_fuse
from attnlib.ops.torch.paged import PagedInputs, visible_range

__all__ = ["DecodePlan", "plan_of"]

# Largest query length that is batched; longer queries keep the fused kernel busy on their own.
_MAX_BATCHED_QUERY_LEN = 8
_MAX_PLANS = 8


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """How the requests of a batch are served.

    Attributes:
        starts, lengths: of the batch.
        table: its block table.
        runs: requests that are read in place; None without any.
        groups: requests that are gathered.
        others: requests that are served one after the other.
    """

    starts: list[int]
    lengths: list[int]
    table: Tensor
    runs: Runs | None
    groups: list[Group]
    others: list[Request]

    def holds(self, starts: list[int], lengths: list[int], table: Tensor) -> bool:
        """Whether the plan is that of these values."""
        same = self.starts == starts and self.lengths == lengths
        return same and torch.equal(self.table, table)


def plan_of(
    inputs: PagedInputs,
    starts: Tensor,
    lengths: Tensor,
    dtype: torch.dtype,
    batch_invariant: bool,
    kept: dict[Any, DecodePlan] | None,
) -> DecodePlan:
    """The plan of a batch.

    Args:
        inputs: of the call.
        starts, lengths: `[R + 1]` and `[R]` on the host.
        dtype: of the products.
        batch_invariant: no request shares a call with another.
        kept: plans of earlier calls of the batch, to which the new one is added; or None.
    """
    params, key_cache, value_cache = inputs.params, inputs.key_cache, inputs.value_cache
    biased = params.alibi_slopes is not None or params.query_bias is not None
    on_cpu = inputs.query.device.type == "cpu"  # elsewhere a comparison of tables would wait
    if kept is None or biased or not on_cpu or not isinstance(params.causal, bool):
        return _make(inputs, starts, lengths, dtype, batch_invariant)
    rules = params.causal, params.window, params.attention_chunk_size, params.logits_soft_cap
    caches = tuple((x.shape[1:], x.stride(), x.dtype) for x in (key_cache, value_cache))
    key = (*rules, params.score_function, *caches, dtype, batch_invariant, torch.get_num_threads())
    plan, begins, ends = kept.get(key), starts.tolist(), lengths.tolist()
    if plan is None or not plan.holds(begins, ends, inputs.block_table):
        if len(kept) >= _MAX_PLANS:
            kept.clear()
        plan = _make(inputs, starts, lengths, dtype, batch_invariant)
        plan = kept[key] = replace(plan, table=inputs.block_table.clone())
    return plan


def _make(
    inputs: PagedInputs,
    starts: Tensor,
    lengths: Tensor,
    dtype: torch.dtype,
    batch_invariant: bool,
) -> DecodePlan:
    others = list_requests(starts, lengths, inputs.params.causal)
    runs, groups = None, []
    if not batch_invariant and can_fuse(inputs.query.device, dtype, inputs.params):
        short = [request for request in others if _is_short(request, inputs)]
        runs, gathered = runs_of_requests(short, inputs, dtype)
        groups = [Group.of(requests, inputs) for requests in group_requests(gathered, inputs)]
        served = {request.index for request in (*gathered, *(runs.requests if runs else ()))}
        others = [request for request in others if request.index not in served]
    table = inputs.block_table
    return DecodePlan(starts.tolist(), lengths.tolist(), table, runs, groups, others)


def _is_short(request: Request, inputs: PagedInputs) -> bool:
    """Whether the query is short and sees at least one key."""
    start, end = visible_range(request, inputs.params)
    too_long = request.query_len > _MAX_BATCHED_QUERY_LEN
    return not too_long and request.first_position >= 0 and start < end
