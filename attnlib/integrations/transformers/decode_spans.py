"""Attention of one query per row over adjacent keys, with torch's operators for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlib.integrations.transformers.step_mask import StepMask, first_visible_key

__all__ = ["Spans", "attend_spans", "visible_spans"]

_attend = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Spans:
    """The keys that the rows of a step see.

    Attributes:
        starts: first key of each row.
        end: end of the keys of all rows.
        uniform: whether all rows start at the same key, so that one call serves them.
    """

    starts: tuple[int, ...]
    end: int
    uniform: bool


def visible_spans(step: StepMask) -> Spans | None:
    """The visible keys of each row; None if they are not adjacent, or a row has no token.

    Args:
        step: a causal mask with one query per row and a pattern without segments and spans.
    """
    rows, pattern = step.rows(), step.pattern
    assert pattern is not None
    first = first_visible_key(step, pattern, step.attention_mask)
    if rows is None and isinstance(first, int):
        return Spans((max(first, 0),) * step.batch_size, step.width, True)
    limits = [first] * step.batch_size if isinstance(first, int) else first.tolist()
    starts = [max(limit, 0) for limit in limits]
    if rows is not None:
        if not rows.contiguous or not rows.real.all():
            return None
        starts = [max(*pair) for pair in zip(starts, rows.keys.argmax(1).tolist(), strict=True)]
    return Spans(tuple(starts), step.width, len(set(starts)) == 1)


def attend_spans(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Spans,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The attention, `[B, 1, Hq, D]`.

    Args:
        query, key, value: `[B, Hq, 1, D]`, `[B, Hkv, S, D]`, `[B, Hkv, S, D]`.
        spans: the visible keys.
        scale, soft_cap, sinks: of the layer.
    """
    batch, heads, _, size = query.shape
    # Query heads that share a KV head are rows of one product, so that keys are read once.
    rows = query if key.shape[1] == heads else query.reshape(batch, key.shape[1], -1, size)
    if spans.uniform:
        if spans.starts[0] != 0 or spans.end != key.shape[2]:
            start, count = spans.starts[0], spans.end - spans.starts[0]
            key, value = key.narrow(2, start, count), value.narrow(2, start, count)
        if soft_cap is None and sinks is None:
            out = _attend(rows, key, value, scale=scale)
        else:
            out = _by_scores(rows, key, value, scale, soft_cap, sinks)
    else:
        outputs = []
        for row, start in enumerate(spans.starts):
            own, keys = slice(row, row + 1), slice(start, spans.end)
            own_keys, own_values = key[own, :, keys], value[own, :, keys]
            outputs.append(_attend_all(rows[own], own_keys, own_values, scale, soft_cap, sinks))
        out = torch.cat(outputs)
    return out.reshape(batch, 1, heads, size)


def _attend_all(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of `[B, Hkv, G, D]` rows that see all of these keys."""
    if soft_cap is None and sinks is None:
        return _attend(rows, key, value, scale=scale)
    return _by_scores(rows, key, value, scale, soft_cap, sinks)


def _by_scores(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same with a soft cap or sinks, which the fused operator does not have. In float32."""
    batch, heads, group, _ = rows.shape
    cap = soft_cap or 0.0
    keys, values = key.float(), value.float()
    scores = torch.matmul(rows.float() * (scale / cap if cap else scale), keys.mT)
    if cap:
        scores.tanh_().mul_(cap)
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        sink = sinks.float().view(1, heads, group, 1).expand(batch, -1, -1, -1)
        weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    return torch.matmul(weights, values).to(rows.dtype)
