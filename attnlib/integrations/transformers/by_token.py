"""Plain forwards of models with a bias and sinks of query tokens (`token_terms`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnlib.integrations.transformers.batch_plan import BatchPlan, run_layer
from attnlib.integrations.transformers.dense import attend_dense
from attnlib.integrations.transformers.layers import Call, is_transient, layer_for
from attnlib.integrations.transformers.pages import token_pages
from attnlib.integrations.transformers.position_bias import keeps_distances
from attnlib.integrations.transformers.step_batches import paged_plan
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.integrations.transformers.token_terms import (
    query_tensors,
    spread_bias,
    token_fields,
)
from attnlib.spec import AttentionType

__all__ = ["attend_by_token"]


def attend_by_token(call: Call, step: StepMask, bias: torch.Tensor) -> torch.Tensor:
    """Attention with a bias by query token and distance, and with sinks of query tokens.

    Args:
        call: the attention call of such a module.
        step: its mask.
        bias: `[B, Hq, T, S]`.

    Returns:
        `[B, T, Hq, Dv]`.
    """
    reason = None
    if is_transient():
        reason = "a CUDA graph is recorded"
    elif bias.shape != (*call.query.shape[:3], call.key.shape[2]) or not keeps_distances(step):
        reason = "the model adds a position bias to the scores of a mask with gaps"
    if reason is not None:
        return attend_dense(call, step.dense(), bias, reason)
    assert step.pattern is not None  # `keeps_distances` has checked
    left = step.pattern.window.left
    own = replace(call, sinks=None)
    spec = own.spec(
        block_size=1,
        attn_type=AttentionType.DECODER,
        sliding_window=None if left is None else left + 1,
        **token_fields(call.module, call.sinks),
    )
    cache, ratio = token_pages(call.key, call.value)
    layer = layer_for(own, spec)
    key = ("by token", ratio, layer.backend, spec, call.query.device)
    if key not in step.plans:
        step.plans[key] = paged_plan(layer, step, ratio, call.query.device)
    plan: BatchPlan = step.plans[key]
    module: Any = call.module
    spread = spread_bias(bias, int(module.rel_extent), step.q_offset - step.kv_offset)
    given = query_tensors(spread, call.sinks, plan.queries)
    return run_layer(layer, plan, own.query, None, None, cache, query_tensors=given)
