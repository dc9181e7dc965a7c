"""Causal prefills without padding, with the torch backend on a CPU: one call of torch's operator.

The backend calls the same operator once per request (`ops.torch.fused`), after it has packed
queries and gathered keys. Other masks, soft caps and sinks, and calls that are validated, recorded
or observed, are ordinary calls of an attnlib layer.
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


def attend_prefill(call: Call, step: StepMask) -> torch.Tensor | None:
    """Attention of as many queries as keys, `[B, T, Hq, D]`; None for calls of another kind.

    Args:
        call: the attention call.
        step: its mask.
    """
    query, key, value = call.query, call.key, call.value
    square = step.q_length == step.width == step.kv_length
    if query.device.type != "cpu" or not square or OBSERVERS:
        return None
    if call.soft_cap is not None or call.sinks is not None or not call.scale > 0:
        return None
    spec = operator_spec(call, step)
    if spec is None or spec.attention_chunk_size or key.stride(3) != 1 or value.stride(3) != 1:
        return None
    window = spec.sliding_window
    if window is not None and window < step.width:
        return None
    if step.rows() is not None:
        return None
    backend = get_attn_backend(spec, None, query.device, layer_name=layer_name(call.module))
    if backend.get_name() != "torch":
        return None
    grouped = key.shape[1] != query.shape[1]
    out = _attend(query, key, value, is_causal=True, scale=call.scale, enable_gqa=grouped)
    return out.transpose(1, 2)
