"""Models that select keys per query: the arguments `indices` and `block_indices` (M11).

    indices        [B, T, K]     tokens, for all heads (DeepSeek V3.2, GLM-MoE-DSA and relatives)
    block_indices  [B, H, T, K]  blocks of tokens, for each KV head (MiniMax-M3)

Both count the columns of the given keys; kernels count the tokens of a request, without padding.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.batch_plan import BatchPlan, run_layer
from attnlib.integrations.transformers.dense import attend_dense
from attnlib.integrations.transformers.described_mask import read_mask
from attnlib.integrations.transformers.layers import Call, layer_for, layer_name
from attnlib.integrations.transformers.mask_values import step_of_values
from attnlib.integrations.transformers.pages import token_pages
from attnlib.integrations.transformers.plain import mask_of
from attnlib.integrations.transformers.step_batches import paged_plan
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.sparse.key_selection import KeySelection, SelectedKeys, SelectionScope

__all__ = ["SELECTIONS", "attend_selected", "selects_keys"]

SELECTIONS = ("indices", "block_indices")
"""Arguments of sparse models that select keys per query."""


def selects_keys(kwargs: dict[str, Any]) -> bool:
    """Whether a call selects keys."""
    return any(kwargs.get(name) is not None for name in SELECTIONS)


def attend_selected(call: Call, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor:
    """Attention over the selected visible keys, `[B, T, Hq, Dv]`; padding queries give 0.

    Args:
        call: the attention call.
        mask: as in `plain.attend_plain`; a causal mask, with or without padding. A tensor
            `[B or 1, 1, T, S]` is compared with such masks, which synchronizes on a GPU.
        kwargs: `indices` or `block_indices`.

    Raises:
        UnsupportedConfigError: a mask that is not causal, or lists of another form.
    """
    found = read_mask(mask)
    if isinstance(found, torch.Tensor) and found.dim() == 4:  # such as that of compiled code
        found = step_of_values(found, call.query, call.key, None)
        if found is None:
            raise _unsupported(call, "the mask is a tensor [B, heads, T, S] of another form")
    step = found if isinstance(found, StepMask) else mask_of(call, found)
    step.check(call.query, call.key)
    pattern, rows = step.pattern, step.rows()
    if (
        pattern is None
        or not pattern.causal
        or not pattern.is_plain
        or pattern.depends_on_distance
        or (rows is not None and rows.interleaved)
    ):
        raise _unsupported(call, "the mask of the layer is not causal, with padding at the ends")
    lists, size = _lists(call, kwargs)
    if rows is not None and not (rows.contiguous and rows.keys[:, 0].all()):
        if size > 1:
            # The model counts blocks from the first column, padding included, and its choice
            # depends on the states of padding tokens.
            return _attend_blocks_densely(call, step, lists, size)
        lists = _positions_of(lists, step)
    selection = KeySelection(
        # One layer and one batch serve lists of similar lengths.
        max_blocks=1 << max(0, lists.shape[2] - 1).bit_length(),
        block_size=size,
        scope=SelectionScope.ALL_HEADS if lists.shape[1] == 1 else SelectionScope.KV_HEAD,
    )
    cache, ratio = token_pages(call.key, call.value)
    layer = layer_for(call, call.spec(block_size=1, key_selection=selection))
    key = ("selected", ratio, layer.backend, layer.spec, call.query.device)
    if key not in step.plans:
        step.plans[key] = paged_plan(layer, step, ratio, call.query.device)
    plan: BatchPlan = step.plans[key]
    if plan.queries is not None:
        lists = lists.index_select(0, plan.queries)
    selected = SelectedKeys(lists.int().contiguous())
    return run_layer(layer, plan, call.query, None, None, cache, selected_keys=selected)


def _lists(call: Call, kwargs: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """The lists `[B * T, H, K]` and the tokens of a block."""
    tokens, blocks = (kwargs.get(name) for name in SELECTIONS)
    batch, _, queries, _ = call.query.shape
    if tokens is not None:
        if tokens.dim() != 3 or tokens.shape[:2] != (batch, queries):
            raise _unsupported(call, f"indices have shape {tuple(tokens.shape)}")
        return tokens.reshape(batch * queries, 1, -1), 1
    assert blocks is not None  # the caller has found one of the two
    if blocks.dim() != 4 or blocks.shape[:3] != (batch, call.key.shape[1], queries):
        raise _unsupported(call, f"block_indices have shape {tuple(blocks.shape)}")
    indexer = cast(Any, call.module).indexer
    return blocks.transpose(1, 2).reshape(batch * queries, blocks.shape[1], -1), indexer.block_size


def _attend_blocks_densely(
    call: Call, step: StepMask, blocks: torch.Tensor, size: int
) -> torch.Tensor:
    """Attention to blocks of columns `[B * T, H, K]` by an evaluated mask. Queries that see no key,
    such as padding, get the mean of all values, as from eager and sdpa attention."""
    batch, heads, queries, _ = call.query.shape
    count = call.key.shape[2]
    entries = torch.where(blocks < 0, -(-count // size), blocks).long()
    chosen = blocks.new_zeros((*blocks.shape[:2], -(-count // size) + 1), dtype=torch.bool)
    chosen = chosen.scatter_(2, entries, True)[..., :-1]
    columns = chosen.repeat_interleave(size, dim=2)[..., :count]
    columns = columns.view(batch, queries, -1, count).transpose(1, 2)
    columns = columns.repeat_interleave(heads // columns.shape[1], dim=1)
    reason = "the model selects blocks of columns, some of which are padding"
    mask = step.dense() & columns
    out = attend_dense(call, mask, None, reason)
    mean = call.value.mean(dim=2).repeat_interleave(heads // call.value.shape[1], dim=1)
    hidden = ~mask.any(dim=-1).transpose(1, 2)[..., None]
    return torch.where(hidden, mean[:, None].to(out.dtype), out)


def _positions_of(columns: torch.Tensor, step: StepMask) -> torch.Tensor:
    """Lists of positions among the tokens of each row, from lists of columns `[B * T, 1, K]`."""
    padding = step.padding()
    assert padding is not None  # the step has padding rows
    keys = padding.to(columns.device)
    positions = (keys.long().cumsum(1) - 1).masked_fill(~keys, -1)
    per_query = positions.repeat_interleave(step.q_length, dim=0)[:, None]
    inside = (columns >= 0) & (columns < keys.shape[1])
    found = per_query.gather(2, columns.clamp(0, keys.shape[1] - 1).long())
    return found.masked_fill(~inside, -1)


def _unsupported(call: Call, reason: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(
        f"{layer_name(call.module)} selects keys per query, and {reason}, which attnlib does not "
        "support; use attn_implementation='eager'"
    )
