"""What a transformers mask function says, read from the function itself.

transformers describes a mask as a function of (batch, head, query, key) indices put together from a few named parts. Evaluating it costs a
`[B, 1, T, S]` tensor; recognising its parts costs nothing and says what kernels take as arguments: causal, a window, chunks, packed sequences.
A function with any part that is not known here is not guessed at: `recognise` returns None and the mask is evaluated instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from attnlib.spec import Window

__all__ = ["MaskFunction", "Pattern", "recognise"]

MaskFunction = Callable[..., Any]


class Pattern(NamedTuple):
    """A mask that kernels take as arguments.

    Attributes:
        causal: a query sees no later key.
        window: keys visible before and after the query's own.
        chunk: keys are visible only within the query's own chunk of this many positions; None for no chunks.
        segments: [B or 1, T] integers, equal within one packed sequence; None where each row is one sequence.
    """

    causal: bool
    window: Window = Window()
    chunk: int | None = None
    segments: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True when a flag and a window say everything, so that a 2-D padding mask beside them loses nothing."""
        return self.chunk is None and self.segments is None


def recognise(mask_function: MaskFunction) -> Pattern | None:
    """The pattern of a mask function of `transformers.masking_utils`, or None when some part of it is not known."""
    causal, window, chunk, segments = False, Window(), None, None
    for name, values in _parts(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":  # key > query - W
            window = _narrowed(window, values["sliding_window"] - 1, None)
        elif (
            name == "sliding_window_bidirectional_overlay"
        ):  # |query - key| <= W, unlike |query - key| < W of M2
            window = _narrowed(window, values["sliding_window"], values["sliding_window"])
        elif name == "chunked_overlay":
            chunk = values["chunk_size"]
        elif name == "packed_sequence_mask_function":
            segments = values["packed_sequence_mask"]
        elif name != "bidirectional_mask_function":
            return None
    return Pattern(causal, _narrowed(window, None, 0) if causal else window, chunk, segments)


def _parts(function: MaskFunction) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name of the maker, values it closed over) of every part that must hold."""
    module, name = (
        getattr(function, "__module__", ""),
        getattr(function, "__qualname__", "").split(".")[0],
    )
    if module != "transformers.masking_utils":
        yield "unknown", {}
        return
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    values = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if name == "and_masks":
        for part in values["mask_functions"]:
            yield from _parts(part)
    elif (
        name == "remap_positions_for_packed_sequence"
    ):  # distances within one packed sequence are the same before and after
        yield from _parts(values["mask_function"])
    else:
        yield name, values


def _narrowed(window: Window, left: int | None, right: int | None) -> Window:
    return Window(_least(window.left, left), _least(window.right, right))


def _least(first: int | None, second: int | None) -> int | None:
    return (
        min(first, second)
        if first is not None and second is not None
        else first
        if second is None
        else second
    )
