"""Each row of docs/compatibility.md on the original and on attnlib, and what it claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from attnlib import env
from tests.compat.seeds.rows import ROWS, SEEDS
from tests.compat.seeds.table import Row

EXPECTED = {1: 23, 2: 41, 3: 27, 4: 32, 5: 13}
"""Rows of the seeds: the audit of their documents has as many."""
MOST_DIFFERENT = 8


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*env.ENVIRONMENT, *env.FOREIGN_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    yield


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_row(row: Row) -> None:
    """ "same" and "other name" mean equal results; "differs" means that they are not."""
    found = row.difference()
    if row.claim.kind == "differs":
        assert found is not None, f"{row.name} is the same, but is said to differ"
    else:
        assert found is None, f"{row.name}, said to be the same: {found}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_a_module_without_the_names_is_not_the_same(row: Row) -> None:
    """No row passes whatever the module does."""
    assert "raises AttributeError" in str(row.difference(SimpleNamespace()))


def test_every_row_of_the_seeds_is_there() -> None:
    assert {seed.number: len(seed.rows) for seed in SEEDS} == EXPECTED
    assert len({row.number for row in ROWS}) == len(ROWS)


def test_few_rows_differ_and_each_says_why() -> None:
    counts = Counter(row.claim.kind for row in ROWS)
    assert counts["differs"] <= MOST_DIFFERENT
    assert set(counts) <= {"same", "other name", "differs"}
    for row in ROWS:
        assert (row.claim.kind == "same") == (not row.claim.text), row.name
