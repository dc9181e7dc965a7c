"""Decodes with the torch backend on a CPU: one query per row over keys that are read in place.

For such a step the views, checks and plans of a paged call take longer than the attention itself.
If selection chooses the torch backend, this module calls the operator that the backend uses for
requests with adjacent keys (`ops.torch.fused`) directly on slices of the given keys and values.
The visible keys are determined once per step. Calls that are validated, recorded or observed are
ordinary calls of an attnlib layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlib import env
from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers.decode_again import keep_decode
from attnlib.integrations.transformers.layers import Call, layer_name
from attnlib.integrations.transformers.step_mask import StepMask, first_visible_key
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.fused import can_fuse
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionType

__all__ = ["attend_decode"]

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True)
class _Spans:
    """The keys that the rows of a step see.

    Attributes:
        starts: first key of each row.
        end: end of the keys of all rows.
        uniform: whether all rows start at the same key, so that one call serves them.
    """

    starts: tuple[int, ...]
    end: int
    uniform: bool


def attend_decode(call: Call, step: StepMask, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Attention of one query per row, `[B, 1, Hq, D]`; None for calls that need another path.

    Args:
        call, kwargs: the attention call.
        step: its mask.
    """
    query, key, value = call.query, call.key, call.value
    if step.q_length != 1 or query.device.type != "cpu" or OBSERVERS:
        return None
    sizes = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    kind = ("decode", *sizes, query.dtype, call.soft_cap, call.sinks is None)
    if kind in step.plans:
        spans: _Spans | None = step.plans[kind]
    else:
        spans = _spans(call, step)
        if not step.is_reused:  # the next step may have another backend
            step.plans[kind] = spans
    if spans is None or key.stride(3) != 1 or value.stride(3) != 1:
        return None
    batch, heads, _, size = query.shape
    # Query heads that share a KV head are rows of one product, so that keys are read once.
    rows = query.reshape(batch, key.shape[1], -1, size)
    attend = _fused if call.soft_cap is None and call.sinks is None else _by_scores
    if spans.uniform:
        keys = slice(spans.starts[0], spans.end)
        keep_decode(step, call, kwargs, keys.start, keys.stop)
        out = attend(call, rows, key[:, :, keys], value[:, :, keys])
    else:
        outputs = []
        for row, start in enumerate(spans.starts):
            own, keys = slice(row, row + 1), slice(start, spans.end)
            outputs.append(attend(call, rows[own], key[own, :, keys], value[own, :, keys]))
        out = torch.cat(outputs)
    result: torch.Tensor = out.reshape(batch, 1, heads, size)
    return result


def _fused(call: Call, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of `[B, Hkv, G, D]` rows that see all of these keys."""
    out: torch.Tensor = _attend(rows, key, value, 0.0, False, scale=call.scale)[0]
    return out


def _by_scores(
    call: Call, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """The same with a soft cap or sinks, which the fused operator does not have. In float32."""
    batch, heads, group, size = rows.shape
    cap = call.soft_cap or 0.0
    keys, values = key.float(), value.float()
    scores = torch.matmul(rows.float() * (call.scale / cap if cap else call.scale), keys.mT)
    if cap:
        scores.tanh_().mul_(cap)
    if call.sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        sinks = call.sinks.float().view(1, heads, group, 1).expand(batch, -1, -1, -1)
        weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    return torch.matmul(weights, values).to(rows.dtype)


def _spans(call: Call, step: StepMask) -> _Spans | None:
    """The visible keys of the rows, or None if this module does not support the call."""
    pattern, dtype, device = step.pattern, call.query.dtype, call.query.device
    if pattern is None or env.read("ATTNLIB_VALIDATE"):
        return None
    if not pattern.causal or pattern.segments is not None or pattern.spans is not None:
        return None
    sizes = {call.query.shape[3], call.key.shape[3], call.value.shape[3]}
    if (
        len(sizes) > 1
        or call.key.dtype != dtype
        or not can_fuse(device, dtype, AttentionParams(scale=call.scale))
        or (call.soft_cap is not None and not call.soft_cap > 0)
    ):
        return None
    spec = call.spec(
        block_size=1,
        attn_type=AttentionType.DECODER,
        sliding_window=None if pattern.window.left is None else pattern.window.left + 1,
        attention_chunk_size=pattern.chunk,
    )
    backend = get_attn_backend(spec, None, device, layer_name=layer_name(call.module))
    if backend.get_name() != "torch":
        return None
    rows, padding = step.rows(), step.attention_mask
    first = first_visible_key(step, pattern, padding)
    limits = [first] * step.batch_size if isinstance(first, int) else first.tolist()
    starts = [max(limit, 0) for limit in limits]
    if rows is not None:
        if not rows.contiguous or not rows.real.all():
            return None
        starts = [max(*pair) for pair in zip(starts, rows.keys.argmax(1).tolist(), strict=True)]
    return _Spans(tuple(starts), step.width, len(set(starts)) == 1)
