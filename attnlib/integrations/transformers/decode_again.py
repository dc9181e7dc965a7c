"""Decodes on a CPU whose plan is known: later layers of a step, and the steps after it.

A forward reads all weights between two layers, so that the code and the objects of a call come from
memory again: each function that a call enters takes several times as long as in a loop. The first
layer of a step leaves what it has found with the mask of the step. A later layer compares its
tensors and arguments with those, and calls the operator. So does the first layer of the next step,
which reads the padding of its own mask.
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

__all__ = ["DecodeAgain", "attend_known_decode", "keep_decode"]

_MAX_PATTERNS = 8
"""Patterns of one thread whose last decode is kept."""
_ABSENT = (
    "attnlib_step",
    "write_index",
    "cu_seq_lens_q",
    "position_bias",
    "indices",
    "block_indices",
)
"""Arguments with which a call is not repeated."""
_SINKS = ("s_aux", "sinks")


def _never(*_: torch.Tensor) -> bool:
    return False


@dataclass(frozen=True, eq=False)
class _Facts:
    """What a decode has in common with the next step.

    Attributes:
        fits: whether query, key and value have these layouts, with any number of keys.
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
    """The last decodes of a thread, by the patterns of their masks."""

    def __init__(self) -> None:
        self.last: dict[Pattern, _Last] = {}


_local = _Local()


class DecodeAgain:
    """What a decode of a step has found.

    Args:
        facts: see `_Facts`.
        spans: the keys that the rows see.
        keys: number of keys of the calls, seen or not.
    """

    __slots__ = ("facts", "keys", "spans")

    def __init__(self, facts: _Facts, spans: Spans, keys: int) -> None:
        self.facts, self.spans, self.keys = facts, spans, keys

    @classmethod
    def of(cls, call: Call, kwargs: dict[str, Any], pattern: Pattern, spans: Spans) -> DecodeAgain:
        """What a call has found under a mask. Tensors that require a gradient are not compared."""
        states = call.query, call.key, call.value
        name = next((name for name in _SINKS if kwargs.get(name) is not None), None)
        facts = _Facts(
            tensor_check(*states, free=(None, 2, 2)) or _never,
            call.scale,
            call.soft_cap,
            name,
            frozenset(kwargs),
            tuple(given for given in (*_ABSENT, *_SINKS) if given in kwargs and given != name),
            pattern,
            selection_state(),
        )
        return cls(facts, spans, call.key.shape[2])

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        """Attention of another layer of the step, `[B, 1, Hq, D]`; None for a call that differs."""
        facts = self.facts
        if scale != facts.scale or kwargs.keys() != facts.names or OBSERVERS:
            return None
        if not facts.fits(query, key, value) or kwargs.get("softcap") != facts.soft_cap:
            return None
        if key.shape[2] != self.keys or value.shape[2] != self.keys:
            return None
        for name in facts.absent:
            if kwargs[name] is not None:
                return None
        sinks = None if facts.sinks is None else kwargs[facts.sinks]
        if facts.sinks is not None and (sinks is None or sinks.numel() != query.shape[1]):
            return None
        if LAST_UPDATE.layer is not None:
            note_served(key, value)
        return attend_spans(query, key, value, self.spans, scale, facts.soft_cap, sinks)


def attend_known_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepMask,
    scale: float,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Attention of the first layer of a step as the step before has computed it.

    Args:
        query, key, value, kwargs: as in `attnlib_attention`.
        step: the mask of the step.
        scale: softmax scale.

    Returns:
        `[B, 1, Hq, D]`, or None for a call that is not known.
    """
    pattern = step.pattern
    if step.q_length != 1 or step.is_reused or pattern is None or not query.is_cpu:
        return None
    last = _local.last.get(pattern)
    if last is None or query.shape[0] != step.batch_size:
        return None
    if VALIDATE_KEY in ENVIRONMENT or selection_state() != last.facts.selection:
        return None
    if kwargs.get("output_attentions") or weights_are_collected():
        return None
    if torch.is_autocast_enabled("cpu"):
        return None
    spans = visible_spans(step, key, value, last.spans)
    if spans is None:
        return None
    found = DecodeAgain(last.facts, spans, step.kv_length)
    out = found.attend(query, key, value, scale, kwargs)
    if out is not None:
        step.decode = found
        if spans.bias is not None:
            last.keep(spans)
    return out


def keep_decode(step: StepMask, found: DecodeAgain) -> None:
    """Keep what a decode has found, for the other layers of its step and for the next step."""
    if step.decode is not None or torch.is_autocast_enabled("cpu"):
        return
    step.decode = found
    pattern, last = found.facts.pattern, _local.last
    if len(last) >= _MAX_PATTERNS and pattern not in last:
        last.clear()
    last[pattern] = _Last(found.facts, found.spans)
