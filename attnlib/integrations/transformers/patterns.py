"""Recognize a transformers mask function as kernel arguments.

transformers describes a mask as a function of (batch, head, query, key) indices that is composed of
a few named parts. Evaluating it costs a `[B, 1, T, S]` tensor. Inspecting its parts costs nothing
and gives what kernels accept as arguments: causality, a window, chunks and packed sequences. A
function with an unknown part is never guessed: `recognize` returns None and the mask is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attnlib.spec import Window

__all__ = ["MaskFunction", "Pattern", "recognize"]

MaskFunction = Callable[..., Any]


class Pattern(NamedTuple):
    """A mask that kernels accept as arguments.

    Attributes:
        causal: a query sees no later key.
        window: number of keys visible before and after the query's own.
        chunk: keys are visible only within the query's own chunk of this many positions, counted
            from the first token of the row; None without chunks.
        segments: `[B or 1, T]` integers, equal within one packed sequence; None if every row is
            one sequence.
        spans: `[B, >= keys]` integers: the keys of the query's own span are visible, too, if they
            are in the window. Equal and not negative within one span (an image); None without.
        window_outside_spans: number of keys that are visible besides those of the span, including
            the query's own; None for all.
    """

    causal: bool
    window: Window = Window()
    chunk: int | None = None
    segments: torch.Tensor | None = None
    spans: torch.Tensor | None = None
    window_outside_spans: int | None = None

    @property
    def is_plain(self) -> bool:
        """True if causality and window describe the pattern completely."""
        return self.chunk is None and self.segments is None and self.spans is None

    @property
    def depends_on_distance(self) -> bool:
        """True if visibility depends on more than the order of the tokens."""
        right = not self.causal and self.window.right is not None
        bounded = self.window.left is not None or self.window_outside_spans is not None
        return self.chunk is not None or bounded or right


def recognize(mask_function: MaskFunction) -> Pattern | None:
    """The pattern of a mask function of `transformers.masking_utils`.

    Returns:
        The pattern, or None if some part of the function is unknown.
    """
    if getattr(mask_function, "__closure__", ()) is None:
        return _recognize_constant(mask_function)
    return _recognize(mask_function)


@lru_cache(maxsize=16)
def _recognize_constant(mask_function: MaskFunction) -> Pattern | None:
    """The pattern of a function that captures nothing, such as the causal one."""
    return _recognize(mask_function)


def _recognize(mask_function: MaskFunction) -> Pattern | None:
    causal, window, chunk, segments = False, Window(), None, None
    spans, outside = None, None
    for name, values in _parts(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":  # key > query - W
            window = _narrowed(window, values["sliding_window"] - 1, None)
        elif name == "sliding_window_bidirectional_overlay":
            # |query - key| <= W, in contrast to |query - key| < W of M2
            window = _narrowed(window, values["sliding_window"], values["sliding_window"])
        elif name == "chunked_overlay":
            chunk = values["chunk_size"]
        elif name == "packed_sequence_mask_function":
            segments = values["packed_sequence_mask"]
        elif name == "or_masks" and spans is None:
            base, spans = _causal_or_span(values["mask_functions"])
            if base is None:
                return None
            causal, outside = True, base.window.left
        elif name != "bidirectional_mask_function":
            return None
    if spans is not None and (chunk is not None or segments is not None):
        return None
    outside = None if outside is None else outside + 1
    window = _narrowed(window, None, 0) if causal else window
    return Pattern(causal, window, chunk, segments, spans, outside)


def _causal_or_span(
    functions: tuple[MaskFunction, ...],
) -> tuple[Pattern | None, torch.Tensor | None]:
    """The causal pattern and the spans of `causal or in the same span`; (None, None) for others."""
    if len(functions) != 2:
        return None, None
    base, parts = recognize(functions[0]), list(_parts(functions[1]))
    if base is None or not base.causal or base.chunk is not None or not base.is_plain:
        return None, None
    if len(parts) != 1 or parts[0][0] != "blockwise_overlay":
        return None, None
    spans: torch.Tensor = parts[0][1]["block_sequence_ids"]
    return base, spans


def _parts(function: MaskFunction) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name of the factory, captured values) of every part of a conjunction."""
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", "").split(".")[0]
    if module != "transformers.masking_utils":
        yield "unknown", {}
        return
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    values = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if name == "and_masks":
        for part in values["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":
        # Distances within one packed sequence are the same before and after the remapping.
        yield from _parts(values["mask_function"])
    else:
        yield name, values


def _narrowed(window: Window, left: int | None, right: int | None) -> Window:
    return Window(_least(window.left, left), _least(window.right, right))


def _least(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)
