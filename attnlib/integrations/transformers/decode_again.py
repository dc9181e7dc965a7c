"""Calls on a CPU whose plan is known: later layers of a step, and the steps after it.

A forward reads all weights between two layers, so that the code and the objects of a call come from
memory again: each function that a call enters takes several times as long as in a loop. The first
layer of a step leaves what it has found with the mask of the step. A later layer compares its
tensors and arguments with those, and calls the operator. So does the first layer of the next step,
which reads the padding of its own mask: of decodes, and of causal prefills without padding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.instrumentation import ENVIRONMENT, OBSERVERS, VALIDATE_KEY
from attnlib.integrations.transformers.decode_spans import Spans, attend_spans, visible_spans
from attnlib.integrations.transformers.growing_cache import LAST_UPDATE, note_served
from attnlib.integrations.transformers.layers import Call
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.recorded_weights import weights_are_collected
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.ops.signature import tensor_check
from attnlib.selection.current import selection_state

__all__ = ["CallAgain", "Serve", "attend_known", "keep_decode", "keep_in_step", "keep_prefill"]

_MAX_PATTERNS = 8
"""Patterns of one thread whose last decode is kept."""
_ABSENT = (
    *("attnlib_step", "write_index", "cu_seq_lens_q"),
    *("position_bias", "indices", "block_indices"),
)
"""Arguments with which a call is not repeated."""
_SINKS = ("s_aux", "sinks")


Serve = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Any, float, float | None, torch.Tensor | None],
    torch.Tensor,
]


def _never(*_: torch.Tensor) -> bool:
    return False


@dataclass(frozen=True, eq=False)
class _Facts:
    """What a call has in common with that of the next layer, and a decode with the next step.

    Attributes:
        fits: whether query, key and value have these layouts, with any number of keys, and of
            queries in prefills.
        scale, soft_cap, sinks: of the call; `sinks` is the name of the argument.
        names: of the further arguments.
        absent: those among them with which a call is not repeated.
        pattern: of the mask.
        selection: state of the selection that chose the torch backend.
    """

    fits: Callable[..., bool]
    scale: float
    soft_cap: float | None
    sinks: str | None
    names: frozenset[str]
    absent: tuple[str, ...]
    pattern: Pattern
    selection: tuple[Any, ...]


class _Last:
    """The last decode under a pattern. It holds no keys and values, and no large bias."""

    __slots__ = ("facts", "spans")

    def __init__(self, facts: _Facts, spans: Spans) -> None:
        self.facts = facts
        self.spans: Spans | None = None
        self.keep(spans)

    def keep(self, spans: Spans) -> None:
        """Keep spans with a bias, whose memory the next step may use."""
        self.spans = None if spans.bias is None or not spans.is_small else spans


class _Local(threading.local):
    """The last decodes and causal prefills of a thread, by the patterns of their masks."""

    def __init__(self) -> None:
        self.last: dict[Pattern, _Last] = {}
        self.prefills: dict[Pattern, CallAgain] = {}


_local = _Local()


class CallAgain:
    """What a call of a step has found.

    Args:
        facts: see `_Facts`.
        serve: the function that serves it, of query, key, value, `visible`, scale, soft cap and
            sinks.
        visible: what rows see, in the form that `serve` takes.
        queries, keys: numbers of queries and keys of the calls, seen or not.
    """

    __slots__ = ("facts", "keys", "queries", "serve", "visible")

    def __init__(self, facts: _Facts, serve: Serve, visible: Any, queries: int, keys: int) -> None:
        self.facts, self.serve, self.visible = facts, serve, visible
        self.queries, self.keys = queries, keys

    @classmethod
    def of(
        cls,
        call: Call,
        kwargs: dict[str, Any],
        pattern: Pattern,
        visible: Any,
        serve: Serve = attend_spans,
    ) -> CallAgain:
        """What a call has found under a mask. Tensors that require a gradient are not compared."""
        states, queries = (call.query, call.key, call.value), call.query.shape[2]
        name = next((name for name in _SINKS if kwargs.get(name) is not None), None)
        facts = _Facts(
            tensor_check(*states, free=(None if queries == 1 else 2, 2, 2)) or _never,
            call.scale,
            call.soft_cap,
            name,
            frozenset(kwargs),
            tuple(given for given in (*_ABSENT, *_SINKS) if given in kwargs and given != name),
            pattern,
            selection_state(),
        )
        return cls(facts, serve, visible, queries, call.key.shape[2])

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        """Attention of another layer of the step, `[B, T, Hq, D]`; None for a call that differs."""
        facts = self.facts
        if scale != facts.scale or kwargs.keys() != facts.names or OBSERVERS:
            return None
        if not facts.fits(query, key, value) or kwargs.get("softcap") != facts.soft_cap:
            return None
        keys = self.keys
        if key.shape[2] != keys or value.shape[2] != keys or query.shape[2] != self.queries:
            return None
        for name in facts.absent:
            if kwargs[name] is not None:
                return None
        sinks = None if facts.sinks is None else kwargs[facts.sinks]
        if facts.sinks is not None and (sinks is None or sinks.numel() != query.shape[1]):
            return None
        if LAST_UPDATE.layer is not None:
            note_served(key, value)
        return self.serve(query, key, value, self.visible, scale, facts.soft_cap, sinks)


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
    if step.is_reused or pattern is None or not query.is_cpu:
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
    if queries > 1:
        found = _known_prefill(last, step)
    else:
        spans = visible_spans(step, key, value, last.spans)
        if spans is None:
            return None
        found = CallAgain(last.facts, attend_spans, spans, 1, step.kv_length)
    if found is None or (out := found.attend(query, key, value, scale, kwargs)) is None:
        return None
    step.again = found
    if queries == 1 and found.visible.bias is not None:
        last.keep(found.visible)
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
        _keep(_local.last, found.facts.pattern, _Last(found.facts, found.visible))


def keep_prefill(step: StepMask, found: CallAgain) -> None:
    """Keep what a causal prefill without a bias has found, as `keep_decode` does."""
    if keep_in_step(step, found):
        _keep(_local.prefills, found.facts.pattern, found)


def _keep(last: dict[Pattern, Any], pattern: Pattern, found: Any) -> None:
    if len(last) >= _MAX_PATTERNS and pattern not in last:
        last.clear()
    last[pattern] = found
