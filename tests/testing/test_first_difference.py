"""The first differing row: its request, token and position, and what it holds."""

from __future__ import annotations

import math

import torch

from attnlib.testing.batch_spec import parse_batch
from attnlib.testing.budget import compare
from attnlib.testing.first_difference import first_difference, locate_row, sees_no_key

BATCH = parse_batch("q1s9_q3s20_q2s1_pad1")


def test_rows_belong_to_tokens() -> None:
    """M1: position = seq_len - query_len + token; M5: a row before the first key sees none."""
    rows = [locate_row(BATCH, row) for row in range(7)]
    assert rows == [(0, 0, 8), (1, 0, 17), (1, 1, 18), (1, 2, 19), (2, 0, -1), (2, 1, 0), None]
    assert [sees_no_key(BATCH, row) for row in range(7)] == [row == 4 for row in range(7)]


def _described(actual: torch.Tensor, expected: torch.Tensor) -> tuple[int, str]:
    result = compare(actual, expected, expected, torch.float32)
    assert not result.passed
    return first_difference(result, BATCH, actual, expected, {"torch reading it": expected + 1})


def test_the_first_element_above_the_limit_is_named() -> None:
    expected = torch.ones(7, 2, 4, dtype=torch.float64)
    actual = expected.clone()
    actual[3, 1, 2], actual[5, 0, 0], actual[0, 0, 0] = 1.5, 9.0, 1.0 + 1e-8
    row, text = _described(actual, expected)
    assert row == 3 and text == (
        "out differs first in row 3 (token 2 of request 1, position 19), head 1, element 2: "
        "1.5, 1 expected, 2 from torch reading it"
    )


def test_nan_and_infinities_are_differences() -> None:
    expected = torch.zeros(7, 2, dtype=torch.float64)
    expected[4] = -math.inf
    actual = expected.clone()
    actual[4, 1] = math.nan
    row, text = _described(actual, expected)
    assert row == 4 and "position -1), head 1: nan, -inf expected" in text


def test_without_such_an_element_the_largest_error_is_named() -> None:
    """A mean above its limit has no element that is wrong by itself."""
    expected = torch.zeros(7, 2, 4, dtype=torch.float64)
    expected[0] = 1000.0
    actual = expected + 1.5e-4
    actual[6, 1, 3] += 1e-4
    row, text = _described(actual, expected)
    assert row == 6 and text.startswith("out differs most in row 6 (padding), head 1, element 3: ")
