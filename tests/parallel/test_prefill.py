"""Divided prefills against one process, with gloo on a CPU (X10)."""

from __future__ import annotations

import functools

import pytest

from tests.parallel.prefill_cases import PROBLEMS, PROPERTIES, WRONG
from tests.parallel.workers import results

FOUR = (
    *("ring: zigzag", "ring: sinks, soft cap", "ring: latents", "ring: fp8"),
    *("gather: window, sinks, soft cap", "decodes between prefills", "empty ranks"),
)
"""Cases of four ranks, which differ from three in their number only."""


def _compared(world_size: int) -> tuple[str, ...]:
    return FOUR if world_size == 4 else (*PROBLEMS, *PROPERTIES)


@functools.cache
def found(world_size: int) -> dict[str, list[str]]:
    names = (*_compared(world_size), *WRONG)
    return results("tests.parallel.prefill_cases", names, world_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "name"), [(size, name) for size in (2, 3, 4) for name in _compared(size)]
)
def test_results_are_those_of_one_process(world_size: int, name: str) -> None:
    """X10: outputs, LSEs and the share of the keys that each rank stores, of prompts with and
    without context, with decodes among them."""
    texts = found(world_size)[name]
    assert not any(texts), "\n".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_an_error_is_found(name: str, world_size: int) -> None:
    texts = found(world_size)[name]
    assert any(text.startswith("error") for text in texts), texts
    assert all(text == "" or text.startswith("error") for text in texts), texts
