"""The table of decode's numbers: whole, with a source for each, and choices that are those of before it was a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnlib.errors import ContractError
from attnlib.ops.triton.heuristics import decode_numbers as room
from attnlib.ops.triton.heuristics import splits
from attnlib.ops.triton.heuristics.decode_numbers import (
    decode_numbers,
    parse_numbers,
    shipped_numbers,
)
from attnlib.ops.triton.heuristics.splits import choose_num_splits
from attnlib.ops.triton.hopper.support import (
    HOPPER_DECODE_KEYS,
    PAIRS_PER_SM,
    prefers_hopper_decode,
)

LINE: dict[str, Any] = {"name": "limit", "value": 3, "meaning": "a limit", "provenance": "mine"}


def _parse(*lines: dict[str, Any]) -> Any:
    return parse_numbers({"provenance": {"mine": "by hand"}, "numbers": lines}, "mine.json")


def test_every_number_says_where_it_comes_from_and_whether_it_was_measured() -> None:
    """Speed rules: heuristics are fed by tables that say on which chip, with which versions and how they were measured."""
    data = json.loads(
        Path(room.__file__).with_name("tables").joinpath("decode.json").read_text(encoding="utf-8")
    )
    for number, line in zip(shipped_numbers(), data["numbers"], strict=True):
        source = data["provenance"][number.provenance]
        assert number.meaning and ("measured" in line) == (
            "triton 3." in source
        ) != source.startswith("not measured"), number


def test_the_code_uses_the_table() -> None:
    values = decode_numbers()
    assert (
        (splits.SPLIT_LIMIT, splits.RESIDENT_LIMIT)
        == (values["split_limit"], values["resident_limit"])
        == (256, 4)
    )
    assert (
        (splits.MIN_TILES_PER_SPLIT, splits._WAVES)
        == (values["min_tiles_per_split"], values["waves"])
        == (2, 4)
    )
    assert (
        HOPPER_DECODE_KEYS
        == (values["hopper_keys_few_pairs"], values["hopper_keys_many_pairs"])
        == (256, 2048)
    )
    assert PAIRS_PER_SM == values["hopper_pairs_per_multiprocessor"] == 8
    assert len(values) == 7, "a number that nothing uses does not belong here"


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [
        ((1, 8, 8192, 64, 528), 64),
        ((1, 8, 131072, 64, 528), 66),
        ((8, 8, 8192, 64, 528), 33),
        ((64, 8, 8192, 64, 528), 5),
        ((256, 8, 1024, 64, 528), 2),
        ((1, 1, 1 << 22, 64, 528), 256),
        ((2, 2, 300, 32, 216), 5),
        ((48, 1, 32768, 16, 108), 9),
    ],
)
def test_choices_are_those_of_commit_6507bdb(asked: tuple[int, ...], recorded: int) -> None:
    """Recorded when the numbers still stood in the code."""
    assert choose_num_splits(*asked) == recorded


def test_the_kernel_changes_over_where_the_table_says() -> None:
    taken = [keys for keys in range(4096) if prefers_hopper_decode(keys, 132, 8, 132)]
    assert (taken[0], len(taken)) == (256, 4096 - 256)
    taken = [keys for keys in range(4096) if prefers_hopper_decode(keys, 133, 8, 132)]
    assert (taken[0], len(taken)) == (2048, 4096 - 2048)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"value": 0}, r"value=0 must be a whole number of at least 1"),
    ({"value": True}, r"value=True must be"),
    ({"value": "256"}, r"value='256' must be"),
    ({"provenance": "hearsay"}, r"provenance 'hearsay' is not among 'mine'"),
    ({"name": "limit"}, r"'limit' stands there twice"),
    ({"colour": 1}, r"'colour' is not known"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_what_is_wrong_with_a_line_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ContractError, match=r"decode table mine.json, numbers\[1\]: " + words):
        _parse(LINE, {**LINE, "name": "other", **change})


def test_a_line_that_lacks_something_is_named() -> None:
    with pytest.raises(ContractError, match=r"numbers\[0\]: 'meaning' is missing"):
        _parse({name: value for name, value in LINE.items() if name != "meaning"})
    assert [number.value for number in _parse(LINE)] == [3]
