"""Decodes with the torch backend on a CPU: one query per row over keys that are read in place.

For such a step the views, checks and plans of a paged call take longer than the attention itself.
If selection chooses the torch backend, this module calls the operator that the backend uses for
requests with adjacent keys (`ops.torch.fused`) directly on slices of the given keys and values.
The visible keys are determined once per step. Calls that are validated, recorded or observed are
ordinary calls of an attnlib layer.
"""

from __future__ import annotations

import torch

from attnlib import env
from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers.biased_spans import BiasedSpans, attend_biased
from attnlib.integrations.transformers.call_again import CallAgain
from attnlib.integrations.transformers.decode_again import keep_decode
from attnlib.integrations.transformers.decode_spans import attend_spans, visible_spans
from attnlib.integrations.transformers.layers import Call, layer_name
from attnlib.integrations.transformers.recorded_weights import weights_are_recorded
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.fused import can_fuse
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec, AttentionType

__all__ = ["attend_decode", "operator_spec"]


def attend_decode(
    call: Call, step: StepMask, bias: torch.Tensor | None, kwargs: dict[str, object]
) -> torch.Tensor | None:
    """Attention of one query per row, `[B, 1, Hq, D]`; None for calls that need another path.

    Args:
        call, kwargs: the attention call.
        step: its mask.
        bias: `[B or 1, Hq or 1, 1, S]` added to the scores, or None.
    """
    query, key, value = call.query, call.key, call.value
    if step.q_length != 1 or OBSERVERS:
        return None
    sizes = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    kind = ("decode", *sizes, query.dtype, call.soft_cap, call.sinks is None, bias is None)
    if kind in step.plans:
        found: CallAgain | None = step.plans[kind]
    else:
        found = _found(call, step, bias, kwargs)
        if not step.is_reused:  # the next step may have another backend
            step.plans[kind] = found
    if found is None or key.stride(3) != 1 or value.stride(3) != 1:
        return None
    if bias is not None and not found.visible.take(bias, query, key):
        return None
    if not step.is_reused and not weights_are_recorded(kwargs):
        keep_decode(step, found)
    return found.serve(query, key, value, found.visible, call.scale, call.soft_cap, call.sinks)


def _found(
    call: Call, step: StepMask, bias: torch.Tensor | None, kwargs: dict[str, object]
) -> CallAgain | None:
    """What serves the call, or None if this module does not support it."""
    spec, pattern = operator_spec(call, step), step.pattern
    if spec is None or pattern is None:
        return None
    if bias is not None and not (call.soft_cap is None and call.sinks is None):
        return None
    backend = get_attn_backend(spec, None, call.query.device, layer_name=layer_name(call.module))
    if backend.get_name() != "torch":
        return None
    spans = visible_spans(step, call.key, call.value, in_one_call=bias is not None)
    if spans is None:
        return None
    if bias is not None:
        return CallAgain.of(call, kwargs, pattern, BiasedSpans(spans), attend_biased)
    return CallAgain.of(call, kwargs, pattern, spans, attend_spans)


def operator_spec(call: Call, step: StepMask) -> AttentionSpec | None:
    """The spec that selection is asked for, for calls that torch's fused operator may serve; None
    for others. A mask that is not causal hides only padding.

    Args:
        call: the attention call.
        step: its mask.
    """
    pattern, dtype = step.pattern, call.query.dtype
    if pattern is None or env.read("ATTNLIB_VALIDATE"):
        return None
    if pattern.segments is not None or pattern.spans is not None:
        return None
    if not pattern.causal and pattern.depends_on_distance:
        return None
    sizes = {call.query.shape[3], call.key.shape[3], call.value.shape[3]}
    if (
        len(sizes) > 1
        or call.key.dtype != dtype
        or not can_fuse(call.query.device, dtype, AttentionParams(scale=call.scale))
        or (call.soft_cap is not None and not call.soft_cap > 0)
    ):
        return None
    return call.spec(
        block_size=1,
        attn_type=AttentionType.DECODER if pattern.causal else AttentionType.ENCODER_DECODER,
        sliding_window=None if pattern.window.left is None else pattern.window.left + 1,
        attention_chunk_size=pattern.chunk,
    )
