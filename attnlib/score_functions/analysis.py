"""What a score function reads and returns, found by calling it."""

from __future__ import annotations

import dis
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from attnlib.errors import ContractError
from attnlib.score_functions.operators import observed_lookups

if TYPE_CHECKING:
    from attnlib.score_functions.function import ScoreFunction

__all__ = [
    "FAR",
    "MOST_RANGES",
    "bounds_far_from_the_start",
    "count_tile_lookups_of",
    "positions_are_read",
    "sample",
]


MOST_RANGES = 2
"""Ranges of keys that bounds may return."""

FAR = 1 << 20
"""A position after which windows do not reach the first key."""


@lru_cache(maxsize=256)
def bounds_far_from_the_start(function: ScoreFunction, by_head: bool) -> tuple[Any, ...]:
    """What the bounds return for the query at `FAR`, the last one, with zeros for lookups; ()
    without bounds."""
    bounds = function.head_bounds if by_head else function.bounds
    if bounds is None:
        return ()
    tables = dict.fromkeys(function.tensor_names, torch.zeros(1, dtype=torch.int32, device="cpu"))
    head = (0,) if by_head else ()
    with observed_lookups():
        values = bounds(FAR, FAR, FAR + 1, *head, 0, function.namespace(tables))
    if not isinstance(values, tuple) or len(values) not in (4, 4 * MOST_RANGES):
        found = f"{len(values)} values" if isinstance(values, tuple) else type(values).__name__
        raise ContractError(
            f"{bounds.__qualname__} returns {found}: return four key positions (first, last, "
            f"same_first, same_last), or eight for {MOST_RANGES} ranges",
            rule="M10",
        )
    return values


@lru_cache(maxsize=256)
def positions_are_read(function: ScoreFunction) -> bool:
    """Whether the code of the function loads one of its parameters for positions."""
    first = {"score": 1, "score_mod": 3, "mask_mod": 2}[function.form]
    code = function.function.__code__
    positions = set(code.co_varnames[first : first + 2])
    for instruction in dis.get_instructions(code):
        value = instruction.argval  # a tuple for instructions that load two variables
        names = value if isinstance(value, tuple) else (value,)
        if instruction.opname.startswith("LOAD_FAST") and not positions.isdisjoint(names):
            return True
    return False


@lru_cache(maxsize=256)
def count_tile_lookups_of(function: ScoreFunction) -> int:
    with observed_lookups() as shapes:
        try:
            sample(function)
        except (RuntimeError, TypeError):
            return len(function.tensor_names)  # it needs values: count every tensor
    return sum(shape == (3, 5) for shape in shapes)


def sample(function: ScoreFunction) -> Any:
    """What the function returns for 3 queries and 5 keys, with zeros for lookups."""
    rows, keys = torch.arange(3, device="cpu")[:, None], torch.arange(5, device="cpu")
    scores = torch.zeros(3, 5, dtype=torch.float32, device="cpu")
    tables = dict.fromkeys(function.tensor_names, scores[0, :1])
    return function._call(scores, rows, keys, rows, 0, tables)
