"""Calls on a CPU whose plan is known: later layers of a step, and the steps after it.

A forward reads all weights between two layers, so that the code and the objects of a call come from
memory again: each function that a call enters takes several times as long as in a loop. The first
layer of a step leaves what it has found with the mask of the step. A later layer compares its
tensors and arguments with those, and calls the operator. So does the first layer of the next step,
which reads the padding of its own mask: of decodes, and of causal prefills without padding.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from attnlib.instrumentation import ENVIRONMENT, VALIDATE_KEY
from attnlib.integrations.transformers import devices
from attnlib.integrations.transformers.biased_spans import BiasedSpans, attend_biased
from attnlib.integrations.transformers.call_again import CallAgain, Facts
from attnlib.integrations.transformers.decode_spans import Spans, attend_spans, visible_spans
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.recorded_weights import weights_are_collected
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.selection.current import selection_state

__all__ = ["attend_known", "keep_decode", "keep_in_step", "keep_prefill"]

_MAX_PATTERNS = 8
"""Patterns of one thread whose last decode is kept."""


class _Last:
    """The last decode under a pattern, and its spans for steps whose rows begin at the same keys.
    It holds no keys and values, and no large bias."""

    __slots__ = ("facts", "spans")

    def __init__(self, facts: Facts, spans: Spans) -> None:
        self.facts = facts
        self.keep(spans)

    def keep(self, spans: Spans) -> None:
        """Keep the spans of a step."""
        self.spans = spans if spans.is_small else None


class _Local(threading.local):
    """The last decodes and causal prefills of a thread, by the patterns of their masks."""

    def __init__(self) -> None:
        self.last: dict[Pattern, _Last] = {}
        self.prefills: dict[Pattern, CallAgain] = {}


_local = _Local()


def attend_known(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepMask,
    scale: float,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Attention of the first layer of a step as an earlier step has computed it.

    Args:
        query, key, value, kwargs: as in `attnlib_attention`.
        step: the mask of the step.
        scale: softmax scale.

    Returns:
        `[B, T, Hq, D]`, or None for a call that is not known.
    """
    pattern, queries = step.pattern, step.q_length
    if step.is_reused or pattern is None or devices.kind_of(query.device) != "cpu":
        return None
    last: Any = (_local.last if queries == 1 else _local.prefills).get(pattern)
    if last is None or query.shape[0] != step.batch_size:
        return None
    if VALIDATE_KEY in ENVIRONMENT or selection_state() != last.facts.selection:
        return None
    if kwargs.get("output_attentions") or weights_are_collected():
        return None
    if torch.is_autocast_enabled("cpu"):
        return None
    spans = None
    if queries > 1:
        found = _known_prefill(last, step)
    else:
        facts = last.facts
        spans = visible_spans(step, key, value, last.spans, in_one_call=facts.is_biased)
        if spans is None:
            return None
        visible = BiasedSpans(spans) if facts.is_biased else spans
        serve = attend_biased if facts.is_biased else attend_spans
        found = CallAgain(facts, serve, visible, 1, step.kv_length)
    if found is None or (out := found.attend(query, key, value, scale, kwargs)) is None:
        return None
    step.again = found
    if spans is not None and spans.bias is not None:
        last.keep(spans)
    return out


def _known_prefill(last: CallAgain, step: StepMask) -> CallAgain | None:
    """What an earlier prefill has found, for one with as many queries as keys, all of which are
    visible but later ones."""
    queries, window = step.q_length, last.facts.pattern.window.left
    if not queries == step.width == step.kv_length or (window is not None and window + 1 < queries):
        return None
    if step.rows() is not None:
        return None
    return CallAgain(last.facts, last.serve, None, queries, queries)


def keep_in_step(step: StepMask, found: CallAgain) -> bool:
    """Keep what a call has found for the other layers of its step; whether it is new."""
    if step.again is not None or torch.is_autocast_enabled("cpu"):
        return False
    step.again = found
    return True


def keep_decode(step: StepMask, found: CallAgain) -> None:
    """Keep what a decode has found, for the other layers of its step and for the next step."""
    if keep_in_step(step, found):
        visible, facts = found.visible, found.facts
        spans = visible.spans if facts.is_biased else visible
        _keep(_local.last, facts.pattern, _Last(facts, spans))


def keep_prefill(step: StepMask, found: CallAgain) -> None:
    """Keep what a causal prefill without a bias has found, as `keep_decode` does."""
    if keep_in_step(step, found):
        _keep(_local.prefills, found.facts.pattern, found)


def _keep(last: dict[Pattern, Any], pattern: Pattern, found: Any) -> None:
    if len(last) >= _MAX_PATTERNS and pattern not in last:
        last.clear()
    last[pattern] = found
