"""Causal prefills without padding, with the torch backend on a CPU: one call of torch's operator.

Also of queries behind other keys: drafts, turns of a chat. The backend calls the same operator
once per request (`ops.torch.fused`), after it has packed queries and gathered keys. Other masks,
soft caps and sinks, and calls that are validated, recorded or observed, are ordinary calls of an
attnlib layer.
"""

from __future__ import annotations

import torch

from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers.decode import operator_spec
from attnlib.integrations.transformers.layers import Call, layer_name
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.selection import get_attn_backend

__all__ = ["attend_prefill"]

_attend = torch.nn.functional.scaled_dot_product_attention

_MAX_SCORES = 1 << 20
"""Scores per head that a bias is made for; blocks of the backend skip hidden keys of more."""


def attend_prefill(call: Call, step: StepMask) -> torch.Tensor | None:
    """Attention of several queries, `[B, T, Hq, D]`; None for calls of another kind.

    Args:
        call: the attention call.
        step: its mask.
    """
    query, key, value = call.query, call.key, call.value
    square = step.q_length == step.width
    if query.device.type != "cpu" or step.width != step.kv_length or OBSERVERS:
        return None
    scores = step.q_length * step.width
    if not square and (step.q_length > step.width or scores > _MAX_SCORES):
        return None
    if call.soft_cap is not None or call.sinks is not None or not call.scale > 0:
        return None
    spec = operator_spec(call, step)
    if spec is None or spec.attention_chunk_size or key.stride(3) != 1 or value.stride(3) != 1:
        return None
    window = spec.sliding_window
    if square and window is not None and window < step.width:
        return None
    if step.rows() is not None:
        return None
    backend = get_attn_backend(spec, None, query.device, layer_name=layer_name(call.module))
    if backend.get_name() != "torch":
        return None
    grouped = key.shape[1] != query.shape[1]
    bias = None if square else _bias(step, window, query.dtype)
    given = (query, key, value, bias)
    out = _attend(*given, is_causal=square, scale=call.scale, enable_gqa=grouped)
    return out.transpose(1, 2)


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
