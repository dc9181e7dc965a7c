"""Runs of `generate` that take turns: who has which turn, and how many are timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnlib.bench.token_turns import TokenTurns

TOKENS = 4


class Model:
    """What `TokenTurns` asks of a model.

    Attributes:
        steps: the implementation of each forward, in order.
    """

    def __init__(self) -> None:
        self.steps: list[str] = []
        self._name = ""

    def set_attn_implementation(self, name: str) -> None:
        self._name = name

    def prepare_inputs_for_generation(self) -> str:
        return self._name

    def run(self) -> torch.Tensor:
        for _ in range(TOKENS):
            self.steps.append(self.prepare_inputs_for_generation())
        return torch.arange(TOKENS)


def _turns(model: Model, *names: str, clock: Callable[[], float] | None = None) -> TokenTurns:
    runs = dict.fromkeys(names, model.run)
    return TokenTurns(model, runs) if clock is None else TokenTurns(model, runs, clock)


def test_forwards_alternate_and_the_order_changes_from_round_to_round() -> None:
    model = Model()
    turns = _turns(model, "a", "b")
    turns.round()
    turns.round()
    turns.close()
    assert model.steps == [*"ab" * TOKENS, *"ba" * TOKENS]
    assert {name: tokens.tolist() for name, tokens in turns.tokens.items()} == {
        "a": list(range(TOKENS)),
        "b": list(range(TOKENS)),
    }
    assert model.prepare_inputs_for_generation() == "a"  # the model's own method again


@pytest.mark.parametrize("names", ["a", "ab"])
def test_each_forward_has_a_turn_also_of_one_run_alone(names: str) -> None:
    """And what comes before the first one has one of its own."""
    turns = _turns(Model(), *names)
    for _ in range(2):
        turns.round()
    turns.close()
    for name in names:
        assert [len(each) for each in turns.seconds[name]] == [TOKENS + 1] * 2


def test_a_total_is_the_sum_of_medians_of_turns() -> None:
    ticks = iter(range(1000))
    turns = _turns(Model(), "a", clock=lambda: float(next(ticks)))
    for _ in range(3):
        turns.round()
    turns.close()
    assert turns.total("a") == TOKENS + 1
    assert turns.total("a", first=3) == TOKENS - 2
