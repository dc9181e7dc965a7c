"""Causal prefills without padding, with the torch backend on a CPU: one call of torch's operator.

Also of queries behind other keys: drafts, turns of a chat. The backend calls the same operator
once per request (`ops.torch.fused`), after it has packed queries and gathered keys. It has no soft
caps and sinks, whose scores are computed here if they are few. Other masks, and calls that are
validated, recorded or observed, are ordinary calls of an attnlib layer.
"""

from __future__ import annotations

from functools import partial

import torch

from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers.call_again import CallAgain, Serve
from attnlib.integrations.transformers.decode import operator_spec
from attnlib.integrations.transformers.decode_again import keep_in_step, keep_prefill
from attnlib.integrations.transformers.decode_spans import attend_by_scores
from attnlib.integrations.transformers.layers import Call, layer_name
from attnlib.integrations.transformers.recorded_weights import weights_are_recorded
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.integrations.transformers.torch_operator import attend_fused
from attnlib.ops.autocast import without_autocast
from attnlib.selection import get_attn_backend

__all__ = ["attend_prefill"]

_attend_causal: Serve = partial(attend_fused, causal=True)

_MAX_SCORES = 1 << 20
"""Scores per head that a bias is made for; blocks of the backend skip hidden keys of more."""
_MAX_OWN_SCORES = 1 << 15
"""Scores per head that are computed with soft caps or sinks."""


def attend_prefill(call: Call, step: StepMask, kwargs: dict[str, object]) -> torch.Tensor | None:
    """Attention of several queries, `[B, T, Hq, D]`; None for calls of another kind.

    Args:
        call, kwargs: the attention call.
        step: its mask.
    """
    query, key, value = call.query, call.key, call.value
    square = step.q_length == step.width
    if step.width != step.kv_length or OBSERVERS:
        return None
    linear = call.soft_cap is None and call.sinks is None
    needs_bias = not (square and linear)
    scores, most = step.q_length * step.width, _MAX_SCORES if linear else _MAX_OWN_SCORES
    if needs_bias and (step.q_length > step.width or scores > most):
        return None
    if not call.scale > 0 or (call.sinks is not None and call.sinks.numel() != query.shape[1]):
        return None
    spec = operator_spec(call, step)
    if spec is None or spec.attention_chunk_size or key.stride(3) != 1 or value.stride(3) != 1:
        return None
    window = spec.sliding_window
    if not needs_bias and window is not None and window < step.width:
        return None
    if step.rows() is not None:
        return None
    backend = get_attn_backend(spec, None, query.device, layer_name=layer_name(call.module))
    if backend.get_name() != "torch":
        return None
    bias = _bias(step, window, query.dtype) if needs_bias else None
    serve: Serve = attend_fused if linear else _attend_by_scores
    serve = _attend_causal if bias is None else serve
    if not step.is_reused and step.pattern is not None and not weights_are_recorded(kwargs):
        keep = keep_prefill if bias is None else keep_in_step
        keep(step, CallAgain.of(call, kwargs, step.pattern, bias, serve))
    return serve(query, key, value, bias, call.scale, call.soft_cap, call.sinks)


@without_autocast
def _attend_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a soft cap or sinks; all queries that read a KV head are its rows."""
    (batch, heads, queries, size), kv_heads = query.shape, key.shape[1]
    rows = query.reshape(batch, kv_heads, -1, size)
    if sinks is not None:
        sinks = sinks.reshape(-1).repeat_interleave(queries)
    added = bias.repeat(heads // kv_heads, 1)
    out = attend_by_scores(rows, key, value, added, scale, soft_cap, sinks)
    return out.view(batch, heads, queries, size).transpose(1, 2)


def _bias(step: StepMask, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """`[T, S]`, 0 for the keys that a query sees and -inf for others; one for the layers of a step.
    The last query is at the last key."""
    name = ("prefill", window, dtype)
    if name not in step.plans:
        queries, keys = step.q_length, step.width
        bias = torch.full((queries, keys), -torch.inf, dtype=dtype, device="cpu")
        bias.triu_(keys - queries + 1)
        if window is not None and window < keys:
            bias.add_(torch.full_like(bias, -torch.inf).tril_(keys - queries - window))
        step.plans[name] = bias
    made: torch.Tensor = step.plans[name]
    return made
