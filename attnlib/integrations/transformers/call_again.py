"""What a call on a CPU has found, for calls like it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.instrumentation import OBSERVERS
from attnlib.integrations.transformers.biased_spans import BiasedSpans
from attnlib.integrations.transformers.growing_cache import LAST_UPDATE, note_served
from attnlib.integrations.transformers.layers import Call
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.ops.signature import tensor_check
from attnlib.selection.current import selection_state

__all__ = ["ABSENT", "SINKS", "CallAgain", "Facts", "Serve"]

ABSENT = (
    *("attnlib_step", "write_index", "cu_seq_lens_q"),
    *("position_bias", "indices", "block_indices"),
)
"""Arguments with which a call is not repeated, except decodes with a position bias."""
SINKS = ("s_aux", "sinks")

Serve = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Any, float, float | None, torch.Tensor | None],
    torch.Tensor,
]


def _never(*_: torch.Tensor) -> bool:
    return False


@dataclass(frozen=True, eq=False)
class Facts:
    """What a call has in common with that of the next layer, and a decode with the next step.

    Attributes:
        fits: whether query, key and value have these layouts, with any number of keys, and of
            queries in prefills.
        scale, soft_cap, sinks: of the call; `sinks` is the name of the argument.
        names: of the further arguments.
        absent: those among them with which a call is not repeated.
        pattern: of the mask.
        selection: state of the selection that chose the torch backend.
        is_biased: the model passes a position bias, and `visible` is `BiasedSpans`.
    """

    fits: Callable[..., bool]
    scale: float
    soft_cap: float | None
    sinks: str | None
    names: frozenset[str]
    absent: tuple[str, ...]
    pattern: Pattern
    selection: tuple[Any, ...]
    is_biased: bool


class CallAgain:
    """What a call of a step has found.

    Args:
        facts: see `Facts`.
        serve: the function that serves it, of query, key, value, `visible`, scale, soft cap and
            sinks.
        visible: what rows see, in the form that `serve` takes.
        queries, keys: numbers of queries and keys of the calls, seen or not.
    """

    __slots__ = ("facts", "keys", "queries", "serve", "visible")

    def __init__(self, facts: Facts, serve: Serve, visible: Any, queries: int, keys: int) -> None:
        self.facts, self.serve, self.visible = facts, serve, visible
        self.queries, self.keys = queries, keys

    @classmethod
    def of(
        cls,
        call: Call,
        kwargs: dict[str, Any],
        pattern: Pattern,
        visible: Any,
        serve: Serve,
    ) -> CallAgain:
        """What a call has found under a mask. Tensors that require a gradient are not compared."""
        states, queries = (call.query, call.key, call.value), call.query.shape[2]
        name = next((name for name in SINKS if kwargs.get(name) is not None), None)
        is_biased = isinstance(visible, BiasedSpans)
        used = (name, "position_bias") if is_biased else (name,)
        facts = Facts(
            tensor_check(*states, free=(None if queries == 1 else 2, 2, 2)) or _never,
            call.scale,
            call.soft_cap,
            name,
            frozenset(kwargs),
            tuple(given for given in (*ABSENT, *SINKS) if given in kwargs and given not in used),
            pattern,
            selection_state(),
            is_biased,
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
        visible = self.visible
        if facts.is_biased and not visible.take(kwargs["position_bias"], query, key):
            return None
        if LAST_UPDATE.layer is not None:
            note_served(key, value)
        return self.serve(query, key, value, visible, scale, facts.soft_cap, sinks)
