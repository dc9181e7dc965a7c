"""Plain forwards and `generate`: keys and values `[B, Hkv, S, D]` with their history.

    causal (decoders)   paged: one request per batch row over one-token blocks of the given K and V;
                        block table and queries skip padding
    bidirectional       unpaged without padding (encoders); paged with padding and for cross
                        attention, where the number of queries differs from the number of keys
    packed sequences    unpaged, one request per sequence
    other masks         evaluated, see `dense`

The queries of a row are its last tokens (M1), as in transformers.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.integrations.transformers import devices
from attnlib.integrations.transformers.batch_plan import BatchPlan, pack, run_layer
from attnlib.integrations.transformers.by_token import attend_by_token
from attnlib.integrations.transformers.decode import attend_decode
from attnlib.integrations.transformers.decode_on_device import (
    attend_decode_on_device,
    attend_visible_keys,
)
from attnlib.integrations.transformers.dense import attend_dense
from attnlib.integrations.transformers.described_mask import read_mask
from attnlib.integrations.transformers.growing_cache import note_served
from attnlib.integrations.transformers.layers import (
    Call,
    is_capturing,
    is_transient,
    layer_for,
    transient,
)
from attnlib.integrations.transformers.mask_kinds import (
    broadcast_over_queries,
    dense_reason,
    is_paged,
    window_as_padding,
)
from attnlib.integrations.transformers.mask_tensor import MaskTensor
from attnlib.integrations.transformers.mask_values import step_of_values
from attnlib.integrations.transformers.packing import with_callers_segments
from attnlib.integrations.transformers.pages import token_pages
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.position_bias import (
    distance_fields,
    is_by_distance,
    is_zero,
    load_distances,
)
from attnlib.integrations.transformers.prefill import attend_prefill
from attnlib.integrations.transformers.repeated import remember
from attnlib.integrations.transformers.spans import span_fields
from attnlib.integrations.transformers.step_batches import paged_plan, unpaged_plan
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.integrations.transformers.token_terms import is_by_token
from attnlib.integrations.transformers.whole import attend_visible, attend_whole
from attnlib.spec import AttentionType, MaskKind, Window

__all__ = ["attend_plain", "mask_of"]

_MAX_CACHED_SHAPES = 8
_BIDIRECTIONAL = Pattern(False)
_BIASED = "the model adds a position bias to the scores"
_local = threading.local()


def attend_plain(
    call: Call, mask: torch.Tensor | None, bias: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Attention over keys that include their history, `[B, T, Hq, Dv]`; padding queries give 0.

    Args:
        call: the attention call.
        mask: the result of `attnlib_mask`, a padding mask `[B, S]` (nonzero for tokens), or a mask
            `[B or 1, Hq or 1, T or 1, S]` (bool, or added to the scores).
        bias: `[B or 1, Hq or 1, T or 1, S]` added to the scores, or None.
        kwargs: further arguments of the model; `cu_seq_lens_q` packs sequences.

    Raises:
        ContractError: the mask does not fit the queries and keys.
        UnsupportedConfigError: the backend that the user requires cannot serve the call.
    """
    if is_capturing(call.query.device) and not is_transient():
        with transient():
            return attend_plain(call, mask, bias, kwargs)
    found = read_mask(mask) if not is_transient() or isinstance(mask, MaskTensor) else mask
    if isinstance(found, torch.Tensor) and found.dim() == 4:
        if bias is None and (out := attend_visible_keys(call, found)) is not None:
            return out
        described = None if is_transient() else _described(call, found)
        if described is None:
            return attend_dense(call, found, bias, "the mask is a tensor [B, heads, T, S]")
        found = described
    if found is None and bias is None and not call.causal and not is_transient():
        if (out := attend_whole(call, kwargs)) is not None:
            return out
    step = found if isinstance(found, StepMask) else mask_of(call, found)
    if step.q_length == 1 < call.query.shape[2]:
        if (broadcast := broadcast_over_queries(step, call.query.shape[2])) is None:
            return attend_dense(call, step.dense(), bias, "one mask row serves all queries")
        step = broadcast
    step.check(call.query, call.key)
    if bias is not None and is_by_token(call.module):
        return attend_by_token(call, step, bias)
    if bias is not None and not is_transient() and is_zero(bias):
        bias = None
    note_served(call.key, call.value)
    if kwargs.get("cu_seq_lens_q") is None:
        if (out := _attend_by_operator(call, step, bias, kwargs)) is not None:
            return out
    step = with_callers_segments(step, kwargs)
    if bias is None and (out := attend_decode_on_device(call, step)) is not None:
        return out
    if is_transient() and not _is_uniform(step, bias):
        return attend_dense(call, step.dense(), bias, "a CUDA graph is recorded")
    step = window_as_padding(step)
    if bias is not None:
        if is_by_distance(call, step, bias):
            return _attend_paged(call, step, bias)
        return attend_dense(call, step.dense(), bias, _BIASED)
    if "dense reason" not in step.plans:
        step.plans["dense reason"] = dense_reason(step)
    if (reason := step.plans["dense reason"]) is not None:
        return attend_dense(call, step.dense(), None, reason)
    return _attend_paged(call, step) if is_paged(step) else _attend_unpaged(call, step)


def _attend_by_operator(
    call: Call, step: StepMask, bias: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """What torch's operator for a CPU serves."""
    if devices.kind_of(call.query.device) != "cpu":
        return None
    if step.q_length == 1:
        return attend_decode(call, step, bias, kwargs)
    if bias is not None:
        return None
    attend = attend_visible if step.pattern == _BIDIRECTIONAL else attend_prefill
    return attend(call, step, kwargs)


def mask_of(call: Call, mask: torch.Tensor | None) -> StepMask:
    """The mask that module and padding describe, for models without a mask by transformers.

    Without padding it depends on shapes only, so a few masks are reused between steps.

    Args:
        call: the attention call.
        mask: `[B, up to S]` padding, nonzero for tokens, or None.

    Raises:
        ContractError: the mask has another shape.
    """
    # A bidirectional module without a mask sees all keys in eager and sdpa attention, even if it
    # passes a window (Diffusion Gemma).
    size = None if mask is None and not call.causal else call.sliding_window
    window = Window() if size is None else Window(size - 1, None if call.causal else size - 1)
    pattern = Pattern(call.causal, Window(window.left, 0) if call.causal else window)
    (batch, _, queries, _), keys, device = call.query.shape, call.key.shape[2], call.query.device
    if mask is not None:
        if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] > keys:
            raise ContractError(
                f"attention_mask has shape {tuple(mask.shape)}; it must be [{batch}, up to {keys}] "
                f"(padding), [{batch}, 1 or {call.query.shape[1]}, {queries}, {keys}] (dense), or "
                f"the result of the registered mask function"
            )
        offset = mask.shape[1] - queries if call.causal else 0
        padding = mask.to(device, torch.bool)
        return StepMask(
            pattern, batch, queries, keys, offset, attention_mask=padding, device=device
        )
    cached: dict[Any, StepMask] = _local.__dict__.setdefault("masks", {})
    key = (pattern, batch, queries, keys, device)
    step = cached.get(key)
    if step is None:
        offset = keys - queries if call.causal else 0
        step = StepMask(pattern, batch, queries, keys, offset, device=device, is_reused=True)
    if not is_transient():
        cached[key] = step
        while len(cached) > _MAX_CACHED_SHAPES:
            del cached[next(iter(cached))]
    return step


def _attend_paged(call: Call, step: StepMask, bias: torch.Tensor | None = None) -> torch.Tensor:
    pattern, rows = step.pattern, step.rows()
    assert pattern is not None  # dense_reason covers masks without a pattern
    cache, ratio = token_pages(call.key, call.value)
    if pattern.spans is not None or bias is not None:
        if bias is None:
            layer = layer_for(call, call.spec(block_size=1, **span_fields(pattern)))
        else:
            fields = distance_fields(step, call.key.shape[2])
            layer = layer_for(call, call.spec(block_size=1, **fields))
            load_distances(layer, step, bias)
        key = ("score function", ratio, layer.backend, layer.spec, call.query.device)
        if key not in step.plans:
            step.plans[key] = paged_plan(layer, step, ratio, call.query.device)
        return run_layer(layer, step.plans[key], call.query, None, None, cache)
    trailing = pattern.causal and rows is not None and bool(rows.trailing.any())
    spec = call.spec(
        block_size=1,
        attn_type=AttentionType.DECODER if pattern.causal else AttentionType.ENCODER_DECODER,
        mask_kind=MaskKind.PER_REQUEST if trailing else None,
        sliding_window=None if pattern.window.left is None else pattern.window.left + 1,
        attention_chunk_size=pattern.chunk,
    )
    layer = layer_for(call, spec)
    key = ("paged", ratio, layer.backend, spec, call.query.device)
    if key not in step.plans:
        step.plans[key] = paged_plan(layer, step, ratio, call.query.device)
    out = run_layer(layer, step.plans[key], call.query, None, None, cache)
    remember(call, step, layer, step.plans[key], cache, out)
    return out


def _attend_unpaged(call: Call, step: StepMask) -> torch.Tensor:
    pattern = step.pattern
    assert pattern is not None  # dense_reason covers masks without a pattern
    full = pattern.window.left is None and (pattern.causal or pattern.window.right is None)
    spec = call.spec(
        attn_type=AttentionType.ENCODER_ONLY,
        mask_kind=MaskKind.CAUSAL if pattern.causal else MaskKind.BIDIRECTIONAL,
        window=None if full else pattern.window,
        attention_chunk_size=pattern.chunk,
    )
    layer = layer_for(call, spec)
    key = ("unpaged", layer.backend, spec, call.query.device)
    if key not in step.plans:
        step.plans[key] = unpaged_plan(layer, step, call.query.device)
    plan: BatchPlan = step.plans[key]
    return run_layer(
        layer, plan, call.query, pack(call.key, plan.queries), pack(call.value, plan.queries), None
    )


def _described(call: Call, mask: torch.Tensor) -> StepMask | None:
    return step_of_values(mask, call.query, call.key, call.sliding_window)


def _is_uniform(step: StepMask, bias: torch.Tensor | None) -> bool:
    """Whether the sizes of a call tell all lengths, without a value that is on the device."""
    segments = step.pattern is not None and step.pattern.segments is not None
    return bias is None and step.attention_mask is None and not segments
