"""Divided layers against one process, with gloo on a CPU (X1 to X8)."""

from __future__ import annotations

import functools

import pytest

from tests.parallel.cases import KERNELS, PROBLEMS, PROPERTIES, WRONG
from tests.parallel.compiled_cases import CASES as COMPILED
from tests.parallel.peer_cases import ANY_NUMBER
from tests.parallel.peer_cases import CASES as PEERS
from tests.parallel.workers import results

SMOKE = ("window", "latents", "refusals", "refused batches", "a sink of each rank")
"""Cases of the fast selection, with two ranks."""


FOUR = (
    *("grouped heads", "window", "sinks", "sinks, soft cap, window", "latents", "fp8"),
    *("chunks, contiguous", "refusals"),
)
"""Cases of four ranks, which differ from three in their number only."""


def _compared(world_size: int) -> tuple[str, ...]:
    return FOUR if world_size == 4 else (*PROBLEMS, *PROPERTIES)


@functools.cache
def found(world_size: int, fast: bool = False) -> dict[str, list[str]]:
    names = SMOKE if fast else (*_compared(world_size), *WRONG)
    return results("tests.parallel.cases", names, world_size)


def test_two_ranks_agree_with_one_process() -> None:
    """X4, X5, X8."""
    texts = found(2, fast=True)
    for name in SMOKE[:-1]:
        assert not any(texts[name]), texts[name]
    assert all(text.startswith("error") for text in texts[SMOKE[-1]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "name"), [(size, name) for size in (2, 3, 4) for name in _compared(size)]
)
def test_results_are_those_of_one_process(world_size: int, name: str) -> None:
    """X4, X5: outputs and LSEs of prefills, mixed batches, decodes and verifications."""
    texts = found(world_size)[name]
    assert not any(texts), "\n".join(texts)


@pytest.mark.slow
def test_layers_compile_as_a_whole() -> None:
    """X9. On their own, because torch takes long to import its compiler."""
    names = [*COMPILED]
    for name, texts in results("tests.parallel.compiled_cases", names, 2).items():
        assert not any(texts), (name, texts)


@pytest.mark.slow
def test_interpreted_kernels() -> None:
    """X4, X5: score functions of ranges and of ALiBi, and the merge with a row of sinks."""
    environment = {"TRITON_INTERPRET": "1"}
    for name, texts in results("tests.parallel.cases", [*KERNELS], 2, environment).items():
        assert not any(texts), (name, texts)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "names"), [(2, tuple(PEERS)), (3, ANY_NUMBER)])
def test_exchanges_by_memory(world_size: int, names: tuple[str, ...]) -> None:
    """X5, X6: the kernels, and what does without them."""
    environment = {"TRITON_INTERPRET": "1"}
    found = results("tests.parallel.peer_cases", names, world_size, environment)
    for name, texts in found.items():
        assert not any(texts), (name, texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_an_error_is_found(name: str, world_size: int) -> None:
    """Implementations with one error fail the comparison, on at least one rank."""
    texts = found(world_size)[name]
    assert any(text.startswith("error") for text in texts), texts
    assert all(text == "" or text.startswith("error") for text in texts), texts
