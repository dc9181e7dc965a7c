"""Decodes of padded batches on a GPU: one query per row over the keys that it sees.

Self-attention sees the keys that causality, window and chunk leave, cross-attention all tokens of
the encoder.
"""

from __future__ import annotations

import torch

from attnlib.integrations.transformers import devices
from attnlib.integrations.transformers.batch_plan import BatchPlan, run_layer
from attnlib.integrations.transformers.decode_batch import (
    batch_of_visible_keys,
    decode_batch,
    lasting_tokens,
    sees_all_keys,
)
from attnlib.integrations.transformers.layers import Call, is_transient, layer_for
from attnlib.integrations.transformers.mask_values import visible_keys
from attnlib.integrations.transformers.pages import token_pages
from attnlib.integrations.transformers.repeated import remember
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.spec import AttentionType

__all__ = ["attend_decode_on_device", "attend_visible_keys"]


def attend_decode_on_device(call: Call, step: StepMask) -> torch.Tensor | None:
    """Attention of one query per row without reading the padding on the host.

    Returns:
        `[B, 1, Hq, Dv]`, or None if the call is another one, or the backend needs host lengths.
    """
    pattern, device = step.pattern, call.query.device
    if devices.kind_of(device) != "cuda" or step.q_length != 1:
        return None
    if pattern is None or pattern.segments is not None:
        return None
    if step.attention_mask is None:
        # Lengths are known on the host. A batch that outlives the step costs less than one with
        # these lengths.
        lasts = lasting_tokens(step, call.key, call.value) is not None
        if not lasts or is_transient() or not pattern.causal:
            return None
        if pattern.depends_on_distance and not sees_all_keys(step):
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
    key = ("device", ratio, layer.backend, id(layer.spec), device)
    batch = step.plans.get(key)
    if batch is None or batch.filled_for != step.number:
        capacity = None if is_transient() else lasting_tokens(step, call.key, call.value)
        batch = step.plans[key] = decode_batch(layer, step, pattern, ratio, capacity)
    plan = BatchPlan(batch.metadata, None)
    out = run_layer(layer, plan, call.query, None, None, cache)
    remember(call, step, layer, plan, cache, out, batch)
    return out


def attend_visible_keys(call: Call, mask: torch.Tensor) -> torch.Tensor | None:
    """Attention of one query per row over the keys that a mask shows, on a GPU: nothing is read on
    the host, so a CUDA graph that records it serves every mask of this shape.

    Args:
        call: the attention call.
        mask: a mask that comes as a tensor.

    Returns:
        `[B, 1, Hq, Dv]`, or None if the call or the mask is another one, or the backend needs host
        lengths.
    """
    device = call.query.device
    if devices.kind_of(device) != "cuda" or call.query.shape[2] != 1:
        return None
    visible = visible_keys(mask, call.key.shape[2])
    if visible is None or visible.shape[0] not in (1, call.query.shape[0]):
        return None
    spec = call.spec(block_size=1, attn_type=AttentionType.DECODER)
    layer = layer_for(call, spec)
    if layer.backend.get_builder_cls().needs_host_lengths:
        return None
    cache, ratio = token_pages(call.key, call.value)
    batch = batch_of_visible_keys(layer, visible.expand(call.query.shape[0], -1), ratio)
    return run_layer(layer, BatchPlan(batch.metadata, None), call.query, None, None, cache)
