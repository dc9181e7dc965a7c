"""Operations outside `Attention` refuse wrong arguments or are right, and write only their memory.

Corrupted page lists of FlashInfer's names, arguments of FlashAttention's functions, and arguments
of the operations of caches. Without options the number of draws is bounded:

    pytest tests/properties/test_corruptions.py --draws 10000
"""

from __future__ import annotations

import os
import re
from collections import Counter
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
"""Draws of each operation without options."""


@pytest.fixture(autouse=True)
def _defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNLIB_VALIDATE", raising=False)
    monkeypatch.setenv("ATTNLIB_BACKEND", os.environ.get("ATTNLIB_BACKEND", "torch"))


@pytest.mark.parametrize(
    "make", [make for makes in KINDS.values() for make in makes], ids=lambda make: make.__name__
)
def test_a_corrupted_call_is_refused_or_right(make, request: pytest.FixtureRequest) -> None:
    option = request.config.getoption
    count = sum(len(makes) for makes in KINDS.values())
    draws = BOUNDED if option("--draws") is None else -(-option("--draws") // count)
    outcomes: Counter[str] = Counter()
    for seed in range(option("--draw-seed"), option("--draw-seed") + draws):
        torch.manual_seed(seed)
        rng = Random(seed)
        try:
            outcomes[check_trial(rng, make(rng))] += 1
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}", pytrace=bool(error.__cause__))
    print(f"{make.__name__}: {dict(outcomes)}")
    assert draws < 20 or outcomes["refused"] and outcomes["right"]


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
