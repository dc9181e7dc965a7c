"""Image spans: causal attention in which the tokens of an image see the whole image.

transformers describes them as a union of masks. The bidirectional tokens of Gemma 3, Gemma 4 and
PaliGemma become the score function `bidirectional_spans`, with two integers per position instead of
a `[T, S]` mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.score_functions.builtin import bidirectional_spans, span_tensors
from attnlib.spec import AttentionType, MaskKind, Window

__all__ = ["span_batch_tensors", "span_fields", "span_reason"]


def span_fields(pattern: Pattern) -> dict[str, Any]:
    """Fields of the spec of a layer with this mask."""
    left = pattern.window.left
    return {
        "attn_type": AttentionType.DECODER,
        "mask_kind": MaskKind.BIDIRECTIONAL,
        "window": None if left is None else Window(left, None),
        "score_function": bidirectional_spans(pattern.window_outside_spans),
    }


def span_reason(step: StepMask) -> str | None:
    """Why kernels cannot apply a mask with spans; None if they can."""
    rows = step.rows()
    if step.kv_offset > 0:
        return "a layer with image spans has dropped keys from its cache"
    if rows is not None and not rows.contiguous:
        return "image spans come with padding between tokens"
    if rows is not None and (rows.interleaved or bool(rows.trailing.any())):
        return "image spans come with padding after the tokens of a row"
    if step.plans.setdefault("spans", _spans(step)) is None:
        return "a span consists of several ranges of tokens"
    return None


def span_batch_tensors(step: StepMask, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The batch tensors of `bidirectional_spans` for a step, on the CPU."""
    spans = step.plans["spans"]  # `span_reason` has found them
    made = span_tensors(spans, max((end for row in spans for _, end in row), default=1))
    return {name: made[name] for name in names}


def _spans(step: StepMask) -> list[list[tuple[int, int]]] | None:
    """For each row its spans as ranges of positions; None if a span has several ranges."""
    pattern, rows = step.pattern, step.rows()
    assert pattern is not None and pattern.spans is not None  # the caller has checked
    ids = pattern.spans.expand(step.batch_size, -1)[:, : step.width].cpu().numpy()
    found = []
    for number, row in enumerate(ids):
        # Positions count the tokens of the row, without the padding in front of them.
        own = row if rows is None else row[rows.keys[number, : len(row)]]
        edges = np.flatnonzero(np.diff(own)) + 1
        ranges = list(zip([0, *edges], [*edges, len(own)], strict=True))
        spans = [(int(a), int(b)) for a, b in ranges if a < b and own[a] >= 0]
        if len({int(own[first]) for first, _ in spans}) < len(spans):
            return None
        found.append(spans)
    return found
