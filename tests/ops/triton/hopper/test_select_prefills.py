"""Which Hopper prefills have tiles of one query head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from attnlib.ops.triton.hopper.select_prefills import _fits_one_head


@pytest.mark.parametrize(
    ("group", "tokens", "window", "chunk", "fits"),
    [
        (5, 2048, (-1, 0), 0, True),
        (7, 9000, (-1, -1), 0, True),
        (5, 2047, (-1, 0), 0, False),
        (5, 9000, (127, 0), 0, False),
        (5, 9000, (-1, 0), 8192, False),
        (1, 9000, (-1, 0), 0, False),
        (4, 9000, (-1, 0), 0, False),
        (64, 9000, (-1, 0), 0, False),
        (128, 9000, (-1, 0), 0, False),
    ],
)
def test_long_prefills_of_groups_that_leave_rows_empty(
    group: int, tokens: int, window: tuple[int, int], chunk: int, fits: bool
) -> None:
    """Divisors and multiples of 64 rows fill a tile. Windows are shorter than tiles of one head."""
    params = SimpleNamespace(window=window, attention_chunk_size=chunk)
    call = SimpleNamespace(shape=SimpleNamespace(group=group), params=params, max_query_len=tokens)
    assert _fits_one_head(cast(Any, call)) == fits
