"""Plain forwards and `generate`: keys and values come with their history as `[B, Hkv, S, D]`, and padding as a mask.

    causal (decoders)      one request per batch row over one-token blocks of K and V as they lie; padding is left out of table and queries
    bidirectional          without padding packed and unpaged (encoders); with padding, and for cross attention, paged: any query may attend
    packed sequences       one request per sequence, unpaged
    anything else          the evaluated mask, see `dense`

The queries of a row are its last tokens (M1), which is where transformers puts them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attnlib.errors import ContractError
from attnlib.integrations.transformers.dense import attend_dense
from attnlib.integrations.transformers.layers import Call, builder_for, layer_for
from attnlib.integrations.transformers.masks import Rows, StepMask, read_mask
from attnlib.integrations.transformers.packing import segment_lengths, with_callers_segments
from attnlib.integrations.transformers.pages import token_pages, token_table
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionType, MaskKind, Window

__all__ = ["attend_plain", "mask_of"]

_KEPT_SHAPES = 8
_local = threading.local()


@dataclass(frozen=True, eq=False)
class _Plan:
    """A step as one layer's backend wants it; `queries` picks the real ones out of the B * T, None takes them all."""

    metadata: Any
    queries: torch.Tensor | None


def attend_plain(
    call: Call, mask: torch.Tensor | None, bias: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Attention over keys that are all there, `[B, T, Hq, Dv]`; rows of padding queries are 0.

    Args:
        call: the call.
        mask: what `attnlib_mask` made, a padding mask `[B, S]` (True or non-zero for tokens), or a mask `[B or 1, Hq or 1, T, S]` (bool, or added).
        bias: `[B or 1, Hq or 1, T, S]` added to the scores, or None.
        kwargs: what else the model passed on; `cu_seq_lens_q` may pack sequences.

    Raises:
        ContractError: the mask does not fit queries and keys.
        UnsupportedConfigError: a backend was insisted on that cannot do it.
    """
    step = read_mask(mask)
    if step is None and mask is not None and mask.dim() == 4:
        return attend_dense(call, mask, bias)
    if step is None:
        step = mask_of(call, mask)
    step.check(call.query, call.key)
    step = _without_window(with_callers_segments(step, kwargs))
    route = None if bias is not None else _route(step)
    if route is None:
        return attend_dense(call, step.dense(), bias)
    return _attend_unpaged(call, step) if route == "unpaged" else _attend_paged(call, step)


def _route(step: StepMask) -> str | None:
    """How kernels can serve this mask: "paged", "unpaged", or None where it has to be evaluated."""
    pattern, rows = step.pattern, step.rows()
    if pattern is None:
        return None
    square = step.q_length == step.width == step.kv_length
    if pattern.segments is not None:
        return "unpaged" if square and rows is None else None
    by_distance = (
        pattern.chunk is not None
        or pattern.window.left is not None
        or (not pattern.causal and pattern.window.right is not None)
    )
    if by_distance and rows is not None and not rows.contiguous:
        return None  # distances count the holes in a row, and kernels see rows without holes
    if pattern.chunk is not None and step.kv_offset > 0:
        return None  # chunks count from the first token of all, which the cache has dropped
    if pattern.causal:
        lost = rows is not None and (
            rows.interleaved or (by_distance and bool(rows.trailing.any()))
        )
        return None if lost else "paged"
    if by_distance:
        return "unpaged" if square else None
    return "unpaged" if square and rows is None else "paged"


def _without_window(step: StepMask) -> StepMask:
    """The same mask with its window turned into padding, where distances count holes and there is one query per row: exact, and for any kernel."""
    pattern, rows = step.pattern, step.rows()
    if (
        rows is None
        or rows.contiguous
        or pattern is None
        or not pattern.is_plain
        or step.q_length != 1
        or pattern.window.left is None
    ):
        return step
    if "without window" not in step.plans:
        keys = rows.keys.copy()
        keys[:, : max(0, step.width - 1 - pattern.window.left)] = False
        step.plans["without window"] = replace(
            step, pattern=Pattern(pattern.causal, Window(None, 0)), plans={"rows": Rows.of(keys, 1)}
        )
    narrowed: StepMask = step.plans["without window"]
    return narrowed


def mask_of(call: Call, mask: torch.Tensor | None) -> StepMask:
    """The mask as module and padding describe it, for models that let transformers make none.

    Without padding it is a matter of shapes alone, so a few are kept from step to step.
    """
    window = (
        Window()
        if call.sliding_window is None
        else Window(call.sliding_window - 1, None if call.causal else call.sliding_window - 1)
    )
    pattern = Pattern(call.causal, Window(window.left, 0) if call.causal else window)
    (batch, _, queries, _), keys, device = call.query.shape, call.key.shape[2], call.query.device
    if mask is not None:
        if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] > keys:
            raise ContractError(
                f"attention_mask has shape {tuple(mask.shape)}; it must be [{batch}, up to {keys}] (padding), "
                f"[{batch}, 1 or {call.query.shape[1]}, {queries}, {keys}] (dense), or what the registered mask function made"
            )
        offset = mask.shape[1] - queries if call.causal else 0
        return StepMask(
            pattern,
            batch,
            queries,
            keys,
            offset,
            attention_mask=mask.to(device, torch.bool),
            device=device,
        )
    kept: dict[Any, StepMask] = _local.__dict__.setdefault("kept", {})
    key = (pattern, batch, queries, keys, device)
    step = kept.get(key) or StepMask(
        pattern, batch, queries, keys, keys - queries if call.causal else 0, device=device
    )
    if not _is_capturing(device):  # what a graph captures is computed only when it is replayed
        kept[key] = step
        while len(kept) > _KEPT_SHAPES:
            del kept[next(iter(kept))]
    return step


def _attend_paged(call: Call, step: StepMask) -> torch.Tensor:
    pattern, rows = step.pattern, step.rows()
    assert pattern is not None  # see _route
    cache, ratio = token_pages(call.key, call.value)
    behind = pattern.causal and rows is not None and bool(rows.trailing.any())
    spec = call.spec(
        block_size=1,
        attn_type=AttentionType.DECODER if pattern.causal else AttentionType.ENCODER_DECODER,
        mask_kind=MaskKind.PER_REQUEST if behind else None,
        sliding_window=None if pattern.window.left is None else pattern.window.left + 1,
        attention_chunk_size=pattern.chunk,
    )
    layer = layer_for(call, spec)
    key = ("paged", ratio, layer.backend, spec, call.query.device)
    if key not in step.plans:
        step.plans[key] = _paged_plan(layer, step, ratio, call.query.device)
    return _run(layer, step.plans[key], call, None, None, cache)


def _paged_plan(layer: Attention, step: StepMask, ratio: int, device: torch.device) -> _Plan:
    spec, rows, batch = layer.spec, step.rows(), step.batch_size
    queries, lengths, taken, causal = [step.q_length] * batch, [step.width] * batch, None, None
    if rows is None:
        starts = torch.arange(batch, dtype=torch.int32, device=device) * ratio
        table = starts[:, None] + torch.arange(step.width, dtype=torch.int32, device=device)
    else:
        lengths = rows.keys.sum(1).tolist()
        table = torch.from_numpy(token_table(rows.keys, ratio)).to(device, non_blocking=True)
    if rows is not None and spec.mask_kind is MaskKind.PER_REQUEST:
        # two requests per row: its tokens, causal, and the padding behind them, which sees them all
        queries = np.stack([rows.real.sum(1), rows.trailing.sum(1)], axis=1).reshape(-1).tolist()
        lengths, table = np.repeat(lengths, 2).tolist(), table.repeat_interleave(2, dim=0)
        taken = _taken(rows.real | rows.trailing, device)
        causal = torch.tensor([True, False], device=device).repeat(batch)
    elif rows is not None and spec.is_causal:
        queries, taken = rows.real.sum(1).tolist(), _taken(rows.real, device)
    free = (
        causal is not None or not spec.is_causal
    )  # queries that are no part of their keys may outnumber them
    common = CommonAttentionMetadata.from_lengths(
        queries, lengths, device=device, causal=causal, is_cross_attention=free
    )
    common = common.replace(block_table_tensor=table)
    return _Plan(builder_for(layer.backend, spec, device).build(0, common), taken)


def _attend_unpaged(call: Call, step: StepMask) -> torch.Tensor:
    pattern = step.pattern
    assert pattern is not None  # see _route
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
        step.plans[key] = _unpaged_plan(layer, step, call.query.device)
    plan: _Plan = step.plans[key]
    return _run(
        layer, plan, call, _packed(call.key, plan.queries), _packed(call.value, plan.queries), None
    )


def _unpaged_plan(layer: Attention, step: StepMask, device: torch.device) -> _Plan:
    rows, taken = step.rows(), None
    assert step.pattern is not None  # see _route
    if step.pattern.segments is not None:
        lengths = segment_lengths(step.pattern.segments, step.batch_size)
    elif rows is None:
        lengths = [step.q_length] * step.batch_size
    else:
        lengths, taken = rows.real.sum(1).tolist(), _taken(rows.real, device)
    common = CommonAttentionMetadata.from_lengths(lengths, lengths, device=device)
    return _Plan(builder_for(layer.backend, layer.spec, device).build(0, common), taken)


def _taken(queries: np.ndarray, device: torch.device) -> torch.Tensor | None:
    """Where the marked queries lie among the B * T; None when all are marked."""
    return (
        None
        if bool(queries.all())
        else torch.from_numpy(np.flatnonzero(queries)).to(device, non_blocking=True)
    )


def _packed(states: torch.Tensor, taken: torch.Tensor | None) -> torch.Tensor:
    """`[B, H, T, D]` -> `[B * T, H, D]`, or the taken ones of those."""
    rows = states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])
    return rows if taken is None else rows.index_select(0, taken)


def _run(
    layer: Attention,
    plan: _Plan,
    call: Call,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: Any,
) -> torch.Tensor:
    batch, heads, queries, _ = call.query.shape
    out: torch.Tensor = layer(_packed(call.query, plan.queries), key, value, cache, plan.metadata)
    if plan.queries is not None:
        whole = out.new_zeros(batch * queries, *out.shape[1:])
        out = whole.index_copy_(0, plan.queries, out)
    return out.view(batch, queries, heads, layer.spec.head_size_v)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
