"""Recognize a transformers mask function as kernel arguments.

transformers describes a mask as a function of (batch, head, query, key) indices that is composed of
a few named parts. Evaluating it costs a `[B, 1, T, S]` tensor. Inspecting its parts costs nothing
and gives what kernels accept as arguments: causality, a window, chunks and packed sequences. A
function with an unknown part is never guessed: `recognize` returns None and the mask is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attnlib.spec import Window

__all__ = ["MaskFunction", "Pattern", "recognize"]

MaskFunction = Callable[..., Any]

_MODULE = "transformers.masking_utils"


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
    """Each mask of a window is another function: a step asks for one of them, so there are few
    calls of Python here."""
    causal, chunk, segments = False, None, None
    spans, outside = None, None
    before, after = [], []  # keys that windows leave visible
    waiting = [mask_function]
    while waiting:
        function = waiting.pop()
        if getattr(function, "__module__", "") != _MODULE:
            return None
        # The name of the function, or of the one that has made it.
        name = getattr(function, "__qualname__", "").partition(".")[0]
        if name == "causal_mask_function":
            causal = True
            after.append(0)
        elif name == "and_masks":
            waiting += _captured(function, "mask_functions")
        elif name == "sliding_window_overlay":  # key > query - W
            before.append(_captured(function, "sliding_window") - 1)
        elif name == "sliding_window_bidirectional_overlay":
            # |query - key| <= W, in contrast to |query - key| < W of M2
            before.append(_captured(function, "sliding_window"))
            after.append(before[-1])
        elif name == "chunked_overlay":
            chunk = _captured(function, "chunk_size")
        elif name == "packed_sequence_mask_function":
            segments = _captured(function, "packed_sequence_mask")
        elif name == "remap_positions_for_packed_sequence":
            # Distances within one packed sequence are the same before and after the remapping.
            waiting.append(_captured(function, "mask_function"))
        elif name == "or_masks" and spans is None:
            base, spans = _causal_or_span(_captured(function, "mask_functions"))
            if base is None:
                return None
            causal, outside = True, base.window.left
            after.append(0)
        elif name != "bidirectional_mask_function":
            return None
    if spans is not None and (chunk is not None or segments is not None):
        return None
    outside = None if outside is None else outside + 1
    window = Window(min(before, default=None), min(after, default=None))
    return Pattern(causal, window, chunk, segments, spans, outside)


def _causal_or_span(
    functions: tuple[MaskFunction, ...],
) -> tuple[Pattern | None, torch.Tensor | None]:
    """The causal pattern and the spans of `causal or in the same span`; (None, None) for others."""
    if len(functions) != 2:
        return None, None
    base = recognize(functions[0])
    if base is None or not base.causal or base.chunk is not None or not base.is_plain:
        return None, None
    name, module = (getattr(functions[1], key, "") for key in ("__qualname__", "__module__"))
    if module != _MODULE or not name.startswith("blockwise_overlay."):
        return None, None
    spans: torch.Tensor = _captured(functions[1], "block_sequence_ids")
    return base, spans


def _captured(function: MaskFunction, name: str) -> Any:
    """The value of a variable that a function captures."""
    function_: Any = function
    return function_.__closure__[function_.__code__.co_freevars.index(name)].cell_contents
