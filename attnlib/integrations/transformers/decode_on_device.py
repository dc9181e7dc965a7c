"""Decodes of padded batches on a GPU, planned without reading the padding on the host.

A host read in every step would wait for the GPU. The visible keys of each row are compacted into a
block table on the device; sizes that the host needs are upper bounds. Self-attention sees the keys
that causality, window and chunk leave, cross-attention all tokens of the encoder.
"""

from __future__ import annotations

import torch

from attnlib.integrations.transformers.batch_plan import BatchPlan, run_layer
from attnlib.integrations.transformers.layers import Call, builder_for, layer_for
from attnlib.integrations.transformers.pages import token_pages
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.repeated import remember
from attnlib.integrations.transformers.step_mask import StepMask, first_visible_key
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionType

__all__ = ["attend_decode_on_device"]


def attend_decode_on_device(call: Call, step: StepMask) -> torch.Tensor | None:
    """Attention of one query per row without reading the padding on the host.

    Returns:
        `[B, 1, Hq, Dv]`, or None if the call is another one, or the backend needs host lengths.
    """
    pattern, device = step.pattern, call.query.device
    if not _reads_synchronize(device) or step.attention_mask is None or step.q_length != 1:
        return None
    if pattern is None or pattern.segments is not None:
        return None
    if not pattern.causal and pattern.depends_on_distance:
        return None
    if pattern.spans is not None:
        return None
    spec = call.spec(block_size=1, attn_type=AttentionType.DECODER)
    layer = layer_for(call, spec)
    if layer.backend.get_builder_cls().needs_host_lengths:
        return None
    cache, ratio = token_pages(call.key, call.value)
    key = ("device", ratio, layer.backend, spec, device)
    if key not in step.plans:
        table, lengths = _visible_keys_on_device(step, pattern, ratio, device)
        starts = torch.arange(step.batch_size + 1, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device, non_blocking=True),
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=step.batch_size,
            num_actual_tokens=step.batch_size,
            max_query_len=1,
            max_seq_len=table.shape[1],
            block_table_tensor=table,
            is_cross_attention=True,  # a row without tokens has more queries than keys
        )
        metadata = builder_for(layer.backend, spec, device).build(0, common)
        step.plans[key] = BatchPlan(metadata, None)
    remember(call, step, layer, step.plans[key], cache)
    return run_layer(layer, step.plans[key], call, None, None, cache)


def _reads_synchronize(device: torch.device) -> bool:
    return device.type == "cuda"


def _visible_keys_on_device(
    step: StepMask, pattern: Pattern, ratio: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block table `[B, bound]` int32 of the keys that each row's query sees, and lengths `[B]`."""
    visible, padding = step.padding(), step.attention_mask
    assert visible is not None and padding is not None  # the caller has checked
    columns = torch.arange(step.width, dtype=torch.int32, device=device)
    if pattern.depends_on_distance:
        first = first_visible_key(step, pattern, padding)
        visible = visible & (columns >= (first if isinstance(first, int) else first[:, None]))
    limits = (
        step.width,
        pattern.chunk,
        None if pattern.window.left is None else pattern.window.left + 1,
    )
    bound = min(limit for limit in limits if limit is not None)
    rank = visible.cumsum(1) - 1
    # Hidden keys go to an extra column, which is cut off.
    rank = torch.where(visible, rank, bound)
    starts = torch.arange(step.batch_size, dtype=torch.int32, device=device)[:, None] * ratio
    table = torch.full((step.batch_size, bound + 1), -1, dtype=torch.int32, device=device)
    table.scatter_(1, rank, starts + columns)
    return table[:, :bound].contiguous(), visible.sum(1, dtype=torch.int32)
