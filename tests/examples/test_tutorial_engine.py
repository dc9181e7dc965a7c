"""The tutorial's engine generates the tokens of a dense reference, whatever the pool holds."""

import pytest
import torch

from examples.tutorial_engine import Engine, TinyDecoder, dense_reference, make_requests


@pytest.fixture(scope="module")
def model() -> TinyDecoder:
    torch.manual_seed(0)
    return TinyDecoder().eval()


@pytest.fixture(scope="module")
def expected(model: TinyDecoder) -> list[list[int]]:
    return [dense_reference(model, request) for request in make_requests(6)]


@pytest.mark.parametrize("num_blocks", [12, 64])
@pytest.mark.parametrize("token_budget", [5, 16])
def test_tokens_equal_the_dense_reference(
    model: TinyDecoder, expected: list[list[int]], num_blocks: int, token_budget: int
) -> None:
    engine, requests = Engine(model, num_blocks, token_budget=token_budget), make_requests(6)
    engine.serve(requests)
    assert [request.generated for request in requests] == expected
    assert engine.allocator.num_free_blocks == num_blocks, "every block is free again"
    assert (engine.num_preemptions > 0) == (num_blocks < 64), "only a small pool preempts"
    assert engine.num_reused_tokens > 0, "the prompts share a prefix"


class ForgetfulEngine(Engine):
    """Clears the first layer's cache before every step."""

    def step(self) -> None:
        self.caches[0].zero_blocks(range(self.caches[0].num_blocks))
        super().step()


def test_the_comparison_can_fail(model: TinyDecoder, expected: list[list[int]]) -> None:
    engine, requests = ForgetfulEngine(model, 64), make_requests(6)
    engine.serve(requests)
    assert [request.generated for request in requests] != expected
