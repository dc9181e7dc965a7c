"""Attention of one query per row over keys in place, with torch's operators for a CPU."""

from __future__ import annotations

from itertools import groupby
from operator import ne

import numpy as np
import torch

from attnlib.integrations.transformers.step_mask import StepMask, first_visible_key

__all__ = ["Spans", "attend_by_scores", "attend_spans", "narrowed", "visible_spans"]

_attend = torch.nn.functional.scaled_dot_product_attention

_BYTES_OF_A_CALL = 1 << 20
"""Keys and values that are read in the time that one more call of the operator takes."""
_ROUND = 64
"""A bias has memory for a multiple of these keys, so that later steps use it too."""
_HIDDEN = bytes(1)
"""A key that a row does not see, in the memory of a mask."""


class Spans:
    """The keys that the rows of a step see.

    Rows that begin at different keys are served by one call with a bias, or by one call for each
    beginning, which reads no hidden key. Rows with hidden keys between others have a bias.

    Args:
        starts: first key of each row, or of all rows.
        end: end of the keys of all rows.
        key_bytes: size of one token's key and value.
        dtype: of the bias.
        seen: `[B, end]` bool, the keys that the rows see; None for all from `starts` on.
        in_one_call: rows that begin at different keys have a bias.

    Attributes:
        starts: as given; empty with `seen`.
        start, end: the keys that any row sees.
        counts: rows of each group of neighbors that begin at one key, if each has a call; or empty.
        firsts: first key of each group.
        bias: `[B, 1, 1, end - start]`, 0 for the keys that a row sees and -inf for others; None
            where no key of a call is hidden.
        room: the memory of the bias, `[B, 1, 1, >= end - start]`, for further keys.
        tokens: `[B, >= end]` bool, the keys that the rows see with further ones; None without bias.
    """

    __slots__ = ("bias", "counts", "end", "firsts", "room", "start", "starts", "tokens")

    def __init__(
        self,
        starts: list[int],
        end: int,
        key_bytes: int,
        dtype: torch.dtype,
        seen: np.ndarray | None = None,
        in_one_call: bool = False,
    ) -> None:
        self.starts, self.start, self.end = starts, min(starts), end
        self.counts: list[int] = []
        self.firsts: list[int] = []
        self.bias: torch.Tensor | None = None
        self.room: torch.Tensor | None = None
        self.tokens: np.ndarray | None = None
        hidden = sum(starts) - self.start * len(starts)
        if not hidden and seen is None:
            return
        if (
            seen is None
            and not in_one_call
            and hidden * key_bytes > sum(map(ne, starts, starts[1:])) * _BYTES_OF_A_CALL
        ):
            for first, rows in groupby(starts):
                self.counts.append(len(list(rows)))
                self.firsts.append(first)
            return
        columns = -(-(end - self.start) // _ROUND) * _ROUND
        places = np.arange(self.start + columns)
        self.tokens = places >= np.asarray(starts)[:, None]
        if seen is not None:
            self.starts, self.tokens[:, :end] = [], seen
        unseen = torch.from_numpy(~self.tokens[:, None, None, self.start :])
        room = torch.zeros(len(starts), 1, 1, columns, dtype=dtype, device="cpu")
        self.room = room.masked_fill_(unseen, -torch.inf)
        self.bias = self.room.narrow(3, 0, end - self.start)

    def until(self, end: int) -> Spans | None:
        """Spans that begin where these do; None where the bias has no room for their keys."""
        room = self.room
        if room is not None and end - self.start > room.shape[3]:
            return None
        made = Spans.__new__(Spans)
        made.starts, made.start, made.end = self.starts, self.start, end
        made.counts, made.firsts = self.counts, self.firsts
        made.room, made.tokens = room, self.tokens
        made.bias = None if room is None else room.narrow(3, 0, end - self.start)
        return made

    @property
    def is_small(self) -> bool:
        """Whether the next step may keep the bias."""
        return self.room is None or self.room.nbytes <= _BYTES_OF_A_CALL


def visible_spans(
    step: StepMask,
    key: torch.Tensor,
    value: torch.Tensor,
    last: Spans | None = None,
    in_one_call: bool = False,
) -> Spans | None:
    """The visible keys of each row; None if a row has none.

    Args:
        step: a mask with one query per row, and a pattern without segments and spans.
        key, value: `[B, Hkv, S, D]` and `[B, Hkv, S, Dv]` of a layer of the step.
        last: the spans of the step before, over keys of these sizes, in one call.
        in_one_call: see `Spans`.
    """
    pattern, end = step.pattern, step.width
    assert pattern is not None
    padding = None if step.attention_mask is None else step.padding()
    first: int | torch.Tensor = 0
    if pattern.chunk is not None or pattern.window.left is not None:
        first = first_visible_key(step, pattern, step.attention_mask)
    starts, seen = [0], None
    if padding is not None:
        tokens = padding.numpy()
        shown = tokens.tobytes()
        known = None if last is None else last.tokens
        if last is not None and known is not None and isinstance(first, int) and first <= 0:
            if shown == known[:, :end].tobytes() and (found := last.until(end)) is not None:
                return found
        if _HIDDEN in shown:
            starts = tokens.argmax(1).tolist()
            # No row has more tokens than columns from its first token on.
            if np.count_nonzero(tokens) != end * len(starts) - sum(starts):
                seen = tokens
    if isinstance(first, torch.Tensor):
        starts = np.maximum(starts, first.numpy()).tolist()
    elif first > 0:
        starts = [max(start, first) for start in starts]
    if seen is not None:
        seen = seen & (np.arange(end) >= np.asarray(starts)[:, None])
        if not seen.any(1).all():
            return None
    elif last is not None and last.starts == starts and (found := last.until(end)) is not None:
        return found
    key_bytes = key.shape[1] * (key.shape[3] + value.shape[3]) * key.element_size()
    return Spans(starts, end, key_bytes, key.dtype, seen, in_one_call)


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
    (batch, heads, _, size), kv_heads = query.shape, key.shape[1]
    # Query heads that share a KV head are rows of one product, so that keys are read once.
    rows = query if kv_heads == heads else query.reshape(batch, kv_heads, -1, size)
    linear = soft_cap is None and sinks is None
    if spans.counts:
        parts = zip(
            torch.split(rows, spans.counts), _parts(key, spans), _parts(value, spans), strict=True
        )
        if linear:
            out = torch.cat([_attend(*part, scale=scale) for part in parts])
        else:
            made = [attend_by_scores(*part, None, scale, soft_cap, sinks) for part in parts]
            out = torch.cat(made)
    else:
        key, value = narrowed(key, value, spans)
        if linear:
            out = _attend(rows, key, value, attn_mask=spans.bias, scale=scale)
        else:
            out = attend_by_scores(rows, key, value, spans.bias, scale, soft_cap, sinks)
    return out.reshape(batch, 1, heads, size)


def narrowed(
    key: torch.Tensor, value: torch.Tensor, spans: Spans
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of equal shapes between the first and the last visible key."""
    start, count = spans.start, spans.end - spans.start
    batch, heads, tokens, size = key.shape
    if count == tokens:
        return key, value
    # One operation each, where `narrow` takes three.
    shape, strides, strides_v = (batch, heads, count, size), key.stride(), value.stride()
    key = key.as_strided(shape, strides, key.storage_offset() + start * strides[2])
    return key, value.as_strided(shape, strides_v, value.storage_offset() + start * strides_v[2])


def _parts(states: torch.Tensor, spans: Spans) -> list[torch.Tensor]:
    """The keys or values that each group of rows sees, in one operation each."""
    row, _, token, _ = strides = states.stride()
    _, heads, _, size = states.shape
    parts, offset, end = [], states.storage_offset(), spans.end
    for count, first in zip(spans.counts, spans.firsts, strict=True):
        shape = (count, heads, end - first, size)
        parts.append(states.as_strided(shape, strides, offset + first * token))
        offset += count * row
    return parts


def attend_by_scores(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of `[B, Hkv, G, D]` rows with a soft cap or sinks, in float32: the fused operator
    has neither.

    Args:
        rows, key, value: `[B, Hkv, G, D]`, `[B, Hkv, S, D]`, `[B, Hkv, S, D]`.
        bias: added to the scores `[B, Hkv, G, S]`, or None.
        scale, soft_cap: of the layer.
        sinks: one per row, `[Hkv * G]`, or None.
    """
    batch, heads, group, _ = rows.shape
    cap = soft_cap or 0.0
    keys, values = key.float(), value.float()
    scores = torch.matmul(rows.float() * (scale / cap if cap else scale), keys.mT)
    if cap:
        scores.tanh_().mul_(cap)
    if bias is not None:
        scores.add_(bias)
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        sink = sinks.float().view(1, heads, group, 1).expand(batch, -1, -1, -1)
        weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    return torch.matmul(weights, values).to(rows.dtype)
