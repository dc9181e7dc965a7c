"""Random calls of every command: no traceback, a known exit status, and a reason for status 2."""

from __future__ import annotations

import random

import pytest

from tests.cli.parsers import parsers
from tests.cli.random_calls import draw, fault, faults

CALLS = 60


@pytest.mark.parametrize("name", sorted(parsers()))
@pytest.mark.filterwarnings("ignore")
def test_random_calls_end_without_a_traceback(name: str) -> None:
    """D5: `python -m tests.cli.random_calls` makes more."""
    found = [f"attnlib {' '.join(map(repr, words))}\n{reason}" for words, reason in
             faults(name, CALLS, seed=0)]  # fmt: skip
    assert not found, "\n\n".join(found[:3])


def test_the_caller_draws_every_flag_and_notices_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, parser in parsers().items():
        rng = random.Random(0)
        words = {word for _ in range(400) for word in draw(parser, ["TEXT"], rng)}
        flags = {action.option_strings[0] for action in parser._actions if action.option_strings}
        assert flags - {"-h"} <= words, name
    monkeypatch.setattr("attnlib.cli.list.list_backends", lambda: 1 / 0)
    assert "ZeroDivisionError" in fault(["list"])
    monkeypatch.setattr("attnlib.cli.list.main", lambda argv: 2)
    assert "status 2 without a reason" in fault(["list"])
