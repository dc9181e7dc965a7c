"""The tutorial's engine over keys and states generates the tokens of a dense reference."""

from __future__ import annotations

import pytest

from examples.gemma3 import Decoder, random_decoder
from examples.tutorial_engine import Request, dense_reference, make_requests
from examples.tutorial_states import KINDS, StateEngine, dense_hybrid


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_decoder(KINDS).eval()


def _requests() -> list[Request]:
    return make_requests(lambda text: list(text.encode())[::3])


def _equal(model: Decoder, requests: list[Request]) -> bool:
    assert all(len(request.generated) == request.max_new_tokens for request in requests)
    return all(one.generated == dense_reference(model, one, dense_hybrid) for one in requests)


@pytest.mark.parametrize("num_blocks", [10, 40])
@pytest.mark.parametrize("token_budget", [5, 64])
def test_tokens_equal_the_dense_reference(
    model: Decoder, num_blocks: int, token_budget: int
) -> None:
    engine, requests = StateEngine(model, num_blocks, token_budget=token_budget), _requests()
    engine.serve(requests)
    assert _equal(model, requests)
    assert engine.allocator.num_free_blocks == num_blocks - 1, "every block is free again"
    assert (engine.num_preemptions > 0) == (num_blocks < 40), "only a small pool preempts"
    assert engine.num_reused_tokens > 0 or num_blocks < 40, "the prompts share a prefix"


class ConfusedEngine(StateEngine):
    """Exchanges the states of two layers when it starts from a checkpoint."""

    def start(self, request: Request) -> None:
        super().start(request)
        for held in self.held[request].states.sources.values():
            self.pool.states["states"].memory[held] = self.pool.states["states"].memory[held[::-1]]


def test_the_comparison_can_fail(model: Decoder) -> None:
    engine, requests = ConfusedEngine(model, 64), _requests()
    engine.serve(requests)
    assert engine.num_reused_tokens > 0 and not _equal(model, requests)
