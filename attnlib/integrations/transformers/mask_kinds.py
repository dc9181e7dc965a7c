"""How the mask of a step is served: over pages, over packed keys, or evaluated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.spans import span_reason
from attnlib.integrations.transformers.step_mask import Rows, StepMask, first_visible_key
from attnlib.spec import Window

__all__ = [
    "broadcast_over_queries",
    "dense_reason",
    "is_paged",
    "is_plain_window",
    "window_as_padding",
]


def is_plain_window(step: StepMask) -> bool:
    """Whether a mask is causal, with or without a window, and served over pages."""
    pattern = step.pattern
    if pattern is None or not pattern.causal or not pattern.is_plain or pattern.chunk is not None:
        return False
    return dense_reason(step) is None


def broadcast_over_queries(step: StepMask, queries: int) -> StepMask | None:
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


def dense_reason(step: StepMask) -> str | None:
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


def is_paged(step: StepMask) -> bool:
    """Whether a mask that kernels can apply is served over pages or over packed keys."""
    pattern = step.pattern
    assert pattern is not None  # dense_reason covers masks without a pattern
    if pattern.spans is not None:
        return True
    if pattern.segments is not None or (not pattern.causal and pattern.depends_on_distance):
        return False
    square = step.q_length == step.width == step.kv_length
    return pattern.causal or not square or step.rows() is not None


def window_as_padding(step: StepMask) -> StepMask:
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
