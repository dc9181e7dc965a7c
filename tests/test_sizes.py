"""Sets of sizes: membership and text."""

from __future__ import annotations

import pytest

from attnlib.errors import ContractError
from attnlib.sizes import Sizes


@pytest.mark.parametrize(
    ("sizes", "members", "others", "text"),
    [
        (Sizes(), (1, 7, 10**6), (0,), "from 1 up"),
        (Sizes(16, 256, 16), (16, 256), (8, 24, 272), "multiples of 16 from 16 to 256"),
        (Sizes(256, None, 256), (256, 512), (128, 300), "multiples of 256 from 256 up"),
        (Sizes(8, 12), (8, 9, 12), (7, 13), "from 8 to 12"),
        (Sizes(exactly=(64, 128)), (64, 128), (1, 96), "64, 128"),
    ],
    ids=str,
)
def test_membership_and_text(
    sizes: Sizes, members: tuple[int, ...], others: tuple[int, ...], text: str
) -> None:
    assert all(size in sizes for size in members)
    assert not any(size in sizes for size in others)
    assert str(sizes) == text


@pytest.mark.parametrize(
    "fields",
    [
        {"exactly": 64},
        {"exactly": [64]},
        {"exactly": ("64",)},
        {"minimum": (64, 128)},
        {"minimum": 0},
        {"maximum": 64.0},
        {"multiple_of": 0},
    ],
    ids=str,
)
def test_other_values_are_refused(fields: dict[str, object]) -> None:
    """Not at the first membership test, as a TypeError or a division by zero."""
    with pytest.raises(ContractError, match=r"is not a set of sizes: give positive integers"):
        Sizes(**fields)  # type: ignore[arg-type]  # the wrong types under test
