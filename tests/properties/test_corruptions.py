"""Operations outside `Attention` refuse wrong arguments or are right, and write only their memory.

Corrupted page lists of FlashInfer's names, arguments of FlashAttention's functions, and arguments
of the operations of caches. Without options the number of calls is bounded:

    pytest tests/properties/test_corruptions.py --draws 10000 --draw-report corruptions.json

`--draws` counts the calls whose arguments were corrupted. Valid calls between them, which must be
right, are counted separately.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from attnlib.errors import ContractError
from tests.properties.corruptions import Trial, check_trial
from tests.properties.corruptions.caches import TRIALS as CACHES
from tests.properties.corruptions.flash_attention import TRIALS as FLASH_ATTENTION
from tests.properties.corruptions.flashinfer import TRIALS as FLASHINFER
from tests.properties.corruptions.indices import TRIALS as INDICES
from tests.properties.corruptions.reading import need, whole

KINDS = {
    "flashinfer": FLASHINFER,
    "flash_attention": FLASH_ATTENTION,
    "caches": CACHES,
    "indices": INDICES,
}
BOUNDED = 60
"""Corrupted calls of each operation without options."""
Counts = dict[str, dict[str, int]]


@pytest.fixture(autouse=True)
def _defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNLIB_VALIDATE", raising=False)
    monkeypatch.setenv("ATTNLIB_BACKEND", os.environ.get("ATTNLIB_BACKEND", "torch"))


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Counts]:
    """Operation -> number of calls by outcome; written to the file of `--draw-report`."""
    found: Counts = {}
    yield found
    report = request.config.getoption("--draw-report")
    if report is not None and found:
        from attnlib.bench.provenance import provenance

        total: Counter[str] = Counter()
        for outcomes in found.values():
            total.update(outcomes)
        given = " ".join(request.config.invocation_params.args)
        facts = {
            "provenance": provenance(
                command=f"pytest {given}", commit=request.config.getoption("--draw-commit")
            ),
            "corrupted": total["corrupted, refused"] + total["corrupted, right"],
            "total": dict(total),
            "operations": found,
        }
        Path(report).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    "make", [make for makes in KINDS.values() for make in makes], ids=lambda make: make.__name__
)
def test_a_corrupted_call_is_refused_or_right(
    make, counts: Counts, request: pytest.FixtureRequest
) -> None:
    option = request.config.getoption
    operations = sum(len(makes) for makes in KINDS.values())
    wanted = BOUNDED if option("--draws") is None else -(-option("--draws") // operations)
    outcomes: Counter[str] = Counter()
    corrupted, seed = 0, option("--draw-seed")
    while corrupted < wanted:
        assert seed < option("--draw-seed") + 4 * wanted + 20, "most calls are not corrupted"
        torch.manual_seed(seed)
        rng = Random(seed)
        try:
            outcome = check_trial(rng, make(rng))
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}", pytrace=bool(error.__cause__))
        corrupted += outcome.corrupted
        kind = "corrupted" if outcome.corrupted else "valid"
        outcomes[f"{kind}, {'refused' if outcome.refused else 'right'}"] += 1
        seed += 1
    counts[make.__name__] = dict(outcomes)
    assert wanted < 20 or outcomes["corrupted, refused"] and outcomes["valid, right"]


def _writes(cache: torch.Tensor, place: int) -> None:
    if cache.dim() != 2 or not isinstance(place, int) or not 0 <= place < len(cache):
        raise ContractError(f"place={place!r} must be a row of the cache")
    cache[place] = 1.0


def _past_the_cache(cache: torch.Tensor, place: int) -> None:
    _writes(cache, place)
    cache.as_strided((1,), (1,), cache.storage_offset() + cache.numel()).fill_(7.0)


def _before_it_refuses(cache: torch.Tensor, place: int) -> None:
    cache[0] = 2.0
    _writes(cache, place)


def _wraps(cache: torch.Tensor, place: int) -> None:
    _writes(cache, place % len(cache) if isinstance(place, int) else place)


def _raw(cache: torch.Tensor, place: int) -> None:
    cache.select(0, place).fill_(1.0)


def _wrong_row(cache: torch.Tensor, place: int) -> None:
    _writes(cache, place)
    cache[-1] = 1.0


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (_past_the_cache, "memory around a cache has changed"),
        (_before_it_refuses, "refused, but cache has changed"),
        (_wraps, "accepted, but"),
        (_raw, "raised (IndexError|TypeError)"),
        (_wrong_row, "cache differs"),
        (_writes, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_check_finds_faults(call, found: str | None) -> None:
    def reference(cache: torch.Tensor, place: int) -> None:
        need(cache.dim() == 2 and whole(place) < len(cache), "no such row")
        cache[place] = 1.0

    messages = []
    for seed in range(200):
        trial = Trial("write", {"place": 1}, {"cache": torch.zeros(4, 2)}, call, reference)
        try:
            check_trial(Random(seed), trial)
        except AssertionError as error:
            messages.append(str(error))
    assert (not messages) if found is None else any(re.search(found, m) for m in messages)
