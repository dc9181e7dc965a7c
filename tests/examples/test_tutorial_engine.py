"""The tutorial's engine generates the tokens of a dense reference, whatever the pool holds."""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from attnlib import example_model
from examples import tutorial_engine
from examples.gemma3 import Decoder, random_decoder
from examples.tutorial_engine import Engine, Request, dense_reference, make_requests

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "tutorial-engine.md"


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_decoder().eval()


def _every(step: int) -> Callable[[str], list[int]]:
    """Every third byte of a text, or fewer."""
    return lambda text: list(text.encode())[::step]


def _equal(model: Decoder, requests: list[Request]) -> bool:
    assert all(len(request.generated) == request.max_new_tokens for request in requests)
    return all(request.generated == dense_reference(model, request) for request in requests)


@pytest.mark.parametrize("num_blocks", [9, 64])
@pytest.mark.parametrize("token_budget", [5, 64])
def test_tokens_equal_the_dense_reference(
    model: Decoder, num_blocks: int, token_budget: int
) -> None:
    engine = Engine(model, num_blocks, token_budget=token_budget)
    requests = make_requests(_every(3))
    assert max(len(request.prompt) for request in requests) > 3 * model.config["sliding_window"]
    engine.serve(requests)
    assert _equal(model, requests)
    assert engine.allocator.num_free_blocks == num_blocks, "every block is free again"
    assert (engine.num_preemptions > 0) == (num_blocks < 64), "only a small pool preempts"
    assert engine.num_reused_tokens > 0, "the prompts share a prefix"


class ForgetfulEngine(Engine):
    """Clears the first layer's cache before every step."""

    def step(self) -> None:
        self.caches[0].zero_blocks(range(self.caches[0].num_blocks))
        super().step()


class WithoutWindows(Engine):
    """Its windowed layers see all keys."""

    def __init__(self, model: Decoder, num_blocks: int) -> None:
        config = {**model.config, "sliding_window": 10_000}
        whole = random_decoder()
        whole.config = config
        super().__init__(whole, num_blocks)


@pytest.mark.parametrize("wrong", [ForgetfulEngine, WithoutWindows])
def test_the_comparison_can_fail(model: Decoder, wrong: type[Engine]) -> None:
    engine, requests = wrong(model, 64), make_requests(_every(5))
    engine.serve(requests)
    assert not _equal(model, requests)


@pytest.mark.slow
@pytest.mark.skipif(not example_model.is_installed(), reason=example_model.INSTALL)
def test_the_real_model_writes_what_the_page_shows() -> None:
    """Also that the tutorial's Gemma is that of transformers. Sampled lines depend on the torch."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        tutorial_engine.main()
    shown = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[0].splitlines()
    printed = out.getvalue().splitlines()
    assert len(printed) == len(shown) == 9
    sampled = (2, 5)
    for number, lines in enumerate(zip(printed, shown, strict=True)):
        assert number in sampled or lines[0] == lines[1]
