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
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attnlib.errors import ContractError
from attnlib.integrations.transformers.batch_plan import BatchPlan, pack, run_layer
from attnlib.integrations.transformers.decode import attend_decode
from attnlib.integrations.transformers.decode_on_device import attend_decode_on_device
from attnlib.integrations.transformers.dense import attend_dense
from attnlib.integrations.transformers.growing_cache import adopt
from attnlib.integrations.transformers.layers import Call, builder_for, layer_for
from attnlib.integrations.transformers.masks import read_mask
from attnlib.integrations.transformers.packing import segment_lengths, with_callers_segments
from attnlib.integrations.transformers.pages import token_pages, token_table
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.position_bias import (
    distance_fields,
    is_by_distance,
    is_zero,
    load_distances,
)
from attnlib.integrations.transformers.repeated import remember
from attnlib.integrations.transformers.spans import span_batch_tensors, span_fields, span_reason
from attnlib.integrations.transformers.step_mask import Rows, StepMask, first_visible_key
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionType, MaskKind, Window

__all__ = ["attend_plain", "is_plain_window", "mask_of", "paged_plan"]

_MAX_CACHED_SHAPES = 8
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
    found = read_mask(mask)
    if isinstance(found, torch.Tensor) and found.dim() == 4:
        return attend_dense(call, found, bias, "the mask is a tensor [B, heads, T, S]")
    step = found if isinstance(found, StepMask) else mask_of(call, found)
    if step.q_length == 1 < call.query.shape[2]:
        broadcast = _broadcast_over_queries(step, call.query.shape[2])
        if broadcast is None:
            return attend_dense(call, step.dense(), bias, "one mask row serves all queries")
        step = broadcast
    step.check(call.query, call.key)
    if bias is not None and is_zero(bias):
        bias = None
    if step.q_length == 1:
        adopt(call.key, call.value)
    if bias is None and kwargs.get("cu_seq_lens_q") is None:
        out = attend_decode(call, step)
        if out is not None:
            return out
    step = with_callers_segments(step, kwargs)
    if bias is None:
        out = attend_decode_on_device(call, step)
        if out is not None:
            return out
    step = _window_as_padding(step)
    if bias is not None:
        if is_by_distance(call, step, bias):
            return _attend_paged(call, step, bias)
        reason = "the model adds a position bias to the scores"
        return attend_dense(call, step.dense(), bias, reason)
    if "dense reason" not in step.plans:
        step.plans["dense reason"] = _dense_reason(step)
    if step.plans["dense reason"] is not None:
        return attend_dense(call, step.dense(), None, step.plans["dense reason"])
    return _attend_paged(call, step) if _is_paged(step) else _attend_unpaged(call, step)


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
        step = StepMask(pattern, batch, queries, keys, offset, device=device)
    if not _is_capturing(device):  # a capture records the plans, so they must not be reused
        cached[key] = step
        while len(cached) > _MAX_CACHED_SHAPES:
            del cached[next(iter(cached))]
    return step


def is_plain_window(step: StepMask) -> bool:
    """Whether a mask is causal, with or without a window, and served over pages."""
    pattern = step.pattern
    if pattern is None or not pattern.causal or not pattern.is_plain or pattern.chunk is not None:
        return False
    return _dense_reason(step) is None


def _broadcast_over_queries(step: StepMask, queries: int) -> StepMask | None:
    """A mask with one row for all queries, as a mask of `queries` rows; None if it must be dense.

    Bidirectional masks without a window are equal for all queries, and some models create them for
    a single one.
    """
    pattern = step.pattern
    if pattern is None or pattern.causal or not pattern.is_plain or pattern.window != Window():
        return None
    key = ("queries", queries)
    if key not in step.plans:
        step.plans[key] = replace(step, q_length=queries, mask_function=None, plans={})
    broadcast: StepMask = step.plans[key]
    return broadcast


def _dense_reason(step: StepMask) -> str | None:
    """Why kernels cannot apply this mask and it must be evaluated; None if they can."""
    pattern = step.pattern
    if pattern is None:
        return "transformers describes this mask by functions that no kernel argument expresses"
    rows = step.rows()
    square = step.q_length == step.width == step.kv_length
    if pattern.spans is not None:
        return span_reason(step)
    if pattern.segments is not None:
        return None if square and rows is None else "packed sequences come with padding or a cache"
    if pattern.depends_on_distance and rows is not None and not rows.contiguous:
        return "a window or chunk covers padding between tokens"
    if pattern.chunk is not None and step.kv_offset > 0:
        # Chunks are counted from the first token, which is no longer in the cache.
        return "a chunked layer has dropped keys from its cache and gets several queries"
    if not pattern.causal:
        narrowed = pattern.depends_on_distance and not square
        return "a bidirectional window needs as many queries as keys" if narrowed else None
    if rows is not None and rows.interleaved:
        return "padding queries are between tokens"
    if rows is not None and pattern.depends_on_distance and bool(rows.trailing.any()):
        return "padding queries after the tokens of a row have a window or chunk"
    return None


def _is_paged(step: StepMask) -> bool:
    """Whether a mask that kernels can apply is served over pages or over packed keys."""
    pattern = step.pattern
    assert pattern is not None  # _dense_reason covers masks without a pattern
    if pattern.spans is not None:
        return True
    if pattern.segments is not None or (not pattern.causal and pattern.depends_on_distance):
        return False
    square = step.q_length == step.width == step.kv_length
    return pattern.causal or not square or step.rows() is not None


def _window_as_padding(step: StepMask) -> StepMask:
    """Express the window or chunk of a single query as padding, where no kernel can apply it.

    With one query per row this is exact: a window over padding between tokens, and a chunk in a
    cache that has dropped the tokens from which chunks are counted.
    """
    pattern = step.pattern
    if pattern is None or pattern.segments is not None or step.q_length != 1:
        return step
    if not pattern.causal or not pattern.depends_on_distance or pattern.spans is not None:
        return step
    rows = step.rows()
    dropped = pattern.chunk is not None and step.kv_offset > 0
    if not dropped and (rows is None or rows.contiguous):
        return step
    if "window as padding" not in step.plans:
        shape = (step.batch_size, step.width)
        keys = np.ones(shape, dtype=bool) if rows is None else rows.keys.copy()
        padding = step.attention_mask
        first = first_visible_key(step, pattern, None if padding is None else padding.cpu())
        keys &= np.arange(step.width) >= np.asarray(first).reshape(-1, 1)
        step.plans["window as padding"] = replace(
            step, pattern=Pattern(True, Window(None, 0)), plans={"rows": Rows.of(keys, 1)}
        )
    narrowed: StepMask = step.plans["window as padding"]
    return narrowed


def _attend_paged(call: Call, step: StepMask, bias: torch.Tensor | None = None) -> torch.Tensor:
    pattern, rows = step.pattern, step.rows()
    assert pattern is not None  # _dense_reason covers masks without a pattern
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
        return run_layer(layer, step.plans[key], call, None, None, cache)
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
    remember(call, step, layer, step.plans[key], cache)
    return run_layer(layer, step.plans[key], call, None, None, cache)


def paged_plan(layer: Attention, step: StepMask, ratio: int, device: torch.device) -> BatchPlan:
    """The batch of a step over pages of one token.

    Args:
        layer: the layer that the batch is built for.
        step: the mask.
        ratio: distance between two rows in block ids (`token_pages`).
        device: where the batch is read.
    """
    spec, rows, batch = layer.spec, step.rows(), step.batch_size
    spans = None if step.pattern is None else step.pattern.spans
    queries, lengths, indices, causal = [step.q_length] * batch, [step.width] * batch, None, None
    if rows is None:
        starts = torch.arange(batch, dtype=torch.int32, device=device) * ratio
        table = starts[:, None] + torch.arange(step.width, dtype=torch.int32, device=device)
    else:
        lengths = rows.keys.sum(1).tolist()
        table = torch.from_numpy(token_table(rows.keys, ratio)).to(device, non_blocking=True)
    if rows is not None and spec.mask_kind is MaskKind.PER_REQUEST:
        # Two requests per row: its tokens, causal, and the padding after them, which sees them all.
        queries = np.stack([rows.real.sum(1), rows.trailing.sum(1)], axis=1).reshape(-1).tolist()
        lengths, table = np.repeat(lengths, 2).tolist(), table.repeat_interleave(2, dim=0)
        indices = _indices(rows.real | rows.trailing, device)
        causal = torch.tensor([True, False], device=device).repeat(batch)
    elif rows is not None and (spec.is_causal or spec.score_function is not None):
        queries, indices = rows.real.sum(1).tolist(), _indices(rows.real, device)
    # Queries that are not among their keys may outnumber them.
    separate = causal is not None or (not spec.is_causal and spec.score_function is None)
    common = _common(queries, lengths, table, device, causal, separate)
    if spans is not None and spec.score_function is not None:
        tensors = span_batch_tensors(step, spec.score_function.batch_tensors)
        common = common.replace(
            score_tensors={name: rows.to(device) for name, rows in tensors.items()}
        )
    return BatchPlan(builder_for(layer.backend, spec, device).build(0, common), indices)


def _common(
    queries: list[int],
    lengths: list[int],
    table: torch.Tensor,
    device: torch.device,
    causal: torch.Tensor | None,
    separate: bool,
) -> CommonAttentionMetadata:
    """A batch that writes nothing to its cache.

    Unlike `CommonAttentionMetadata.from_lengths` it checks nothing, which saves a twentieth of a
    millisecond in each step.
    """
    starts = np.zeros(len(queries) + 1, dtype=np.int32)
    np.cumsum(queries, out=starts[1:])
    sequences = np.array(lengths, dtype=np.int32)
    contexts = np.maximum(sequences - np.diff(starts), 0)
    starts_cpu, lengths_cpu = torch.from_numpy(starts), torch.from_numpy(sequences)
    return CommonAttentionMetadata(
        query_start_loc=starts_cpu.to(device, non_blocking=True),
        query_start_loc_cpu=starts_cpu,
        seq_lens=lengths_cpu.to(device, non_blocking=True),
        seq_lens_cpu=lengths_cpu,
        num_computed_tokens_cpu=torch.from_numpy(contexts),
        num_reqs=len(queries),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(queries, default=0),
        max_seq_len=max(lengths, default=0),
        block_table_tensor=table,
        causal=causal,
        is_cross_attention=separate,
    )


def _attend_unpaged(call: Call, step: StepMask) -> torch.Tensor:
    pattern = step.pattern
    assert pattern is not None  # _dense_reason covers masks without a pattern
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
    plan: BatchPlan = step.plans[key]
    return run_layer(
        layer, plan, call, pack(call.key, plan.queries), pack(call.value, plan.queries), None
    )


def _unpaged_plan(layer: Attention, step: StepMask, device: torch.device) -> BatchPlan:
    rows, indices = step.rows(), None
    assert step.pattern is not None  # _dense_reason covers masks without a pattern
    if step.pattern.segments is not None:
        lengths = segment_lengths(step.pattern.segments, step.batch_size)
    elif rows is None:
        lengths = [step.q_length] * step.batch_size
    else:
        lengths, indices = rows.real.sum(1).tolist(), _indices(rows.real, device)
    common = CommonAttentionMetadata.from_lengths(lengths, lengths, device=device)
    return BatchPlan(builder_for(layer.backend, layer.spec, device).build(0, common), indices)


def _indices(queries: np.ndarray, device: torch.device) -> torch.Tensor | None:
    """Indices of the marked queries among the B * T; None if all are marked."""
    if bool(queries.all()):
        return None
    return torch.from_numpy(np.flatnonzero(queries)).to(device, non_blocking=True)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
