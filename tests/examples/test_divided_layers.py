"""The example of an engine over divided keys generates the tokens of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnlib.parallel import RankGroup
from examples.divided_layers import NEW_TOKENS, PROMPTS, SPECS, Layer, tokens_of
from tests.parallel.workers import results


def serve(group: RankGroup) -> str:
    """Windows, sinks and latents; mixed batches of chunks and decodes."""
    found, wanted = tokens_of(group)
    long = len(found) == len(PROMPTS) and min(map(len, found)) >= NEW_TOKENS
    return "" if long and found == wanted else f"{found}, on one rank {wanted}"


def test_a_number_of_processes_that_divides_no_heads() -> None:
    with pytest.raises(ValueError, match="5 processes must divide the 12 query heads of a KV head"):
        Layer("full", SPECS["full"]).heads_of(0, 5)


CASES: dict[str, Callable[[RankGroup], str]] = {"serve": serve}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_tokens_are_those_of_one_process(world_size: int) -> None:
    texts = results("tests.examples.test_divided_layers", ["serve"], world_size)["serve"]
    assert not any(texts), "\n".join(texts)
