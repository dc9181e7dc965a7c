"""Name the first row in which a result differs from the expected one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.budget import Comparison

__all__ = ["first_difference", "locate_row", "sees_no_key"]


def locate_row(batch: BatchSpec, row: int) -> tuple[int, int, int] | None:
    """The request, the query token and the position (M1) of a row; None for a padding row."""
    for request, (query_len, seq_len) in enumerate(batch.lengths):
        if row < query_len:
            return request, row, seq_len - query_len + row
        row -= query_len
    return None


def sees_no_key(batch: BatchSpec, row: int) -> bool:
    """True for a query token before the first key of its request."""
    place = locate_row(batch, row)
    return place is not None and place[2] < 0


def first_difference(
    comparison: Comparison,
    batch: BatchSpec,
    actual: torch.Tensor,
    expected: torch.Tensor,
    others: Mapping[str, torch.Tensor],
) -> tuple[int, str]:
    """The first row with an element above the limit, and a sentence with its place and numbers.

    Without such an element, as when only the mean error is too large, the row with the largest
    error.

    Args:
        comparison: the failed comparison of `actual` with `expected`.
        batch: the request lengths.
        actual, expected: [T, ...] of equal shapes.
        others: name -> other results of the same shape, to show beside them.
    """
    actual, expected = actual.detach().double(), expected.double()
    error = (actual - expected).abs().masked_fill(actual == expected, 0.0)  # inf - inf is NaN
    error = error.nan_to_num(nan=torch.inf)
    limit = comparison.max_allowed if not comparison.mismatch else torch.finfo(torch.double).max
    wrong = (error > limit).nonzero()
    if len(wrong):
        index, adverb = tuple(wrong[0].tolist()), "first"
    else:
        index, adverb = tuple(torch.unravel_index(error.argmax(), error.shape)), "most"
        index = tuple(int(i) for i in index)
    row, *rest = index
    place = locate_row(batch, row)
    where = "padding"
    if place is not None:
        where = f"token {place[1]} of request {place[0]}, position {place[2]}"
    names = ("head", "element")
    where = f"row {row} ({where})" + "".join(
        f", {name} {i}" for name, i in zip(names, rest, strict=False)
    )
    numbers = [f"{float(actual[index]):.6g}", f"{float(expected[index]):.6g} expected"]
    numbers += [f"{float(result[index]):.6g} from {name}" for name, result in others.items()]
    return row, f"{comparison.quantity} differs {adverb} in {where}: {', '.join(numbers)}"
