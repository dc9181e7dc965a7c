"""The checks of state layers: right backends pass, wrong ones fail the check meant for them."""

from __future__ import annotations

import pytest
import torch

from attnlib.spec import StateSpec
from attnlib.testing.conformance import run_conformance
from attnlib.testing.outcome import Outcome
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.layers import expected
from attnlib.testing.states.oracle import convolve, recurrence
from tests.testing.toy_backend import ToyBackend
from tests.testing.wrong_states import RIGHT_STATES, WRONG_STATES


@pytest.mark.slow
@pytest.mark.parametrize("form", RIGHT_STATES)
def test_right_backends_pass(form: str) -> None:
    """Rules out checks that fail for every backend; a backend of states alone can be verified."""
    report = run_conformance(RIGHT_STATES[form], device="cpu", quick=True)
    assert report.passed, str(report)
    assert report.count(Outcome.PASS) > 50
    assert {result.check[:2] for result in report.results} == {"ST"}
    assert report.base_case == "state layers only"
    assert f"states.forms:{form.partition(',')[0]}" in report.coverage.exercised


@pytest.mark.parametrize("error", WRONG_STATES)
def test_each_wrong_backend_fails_its_check(error: str) -> None:
    backend, check = WRONG_STATES[error]
    report = run_conformance(backend, device="cpu", quick=True, only=check)
    assert report.failed_checks() == (check,), str(report)
    assert not any(result.message.startswith("raised ") for result in report.failures), str(report)


def test_attention_alone_has_no_cases_of_states() -> None:
    report = run_conformance(ToyBackend, device="cpu", quick=True, only="W2,ST*", against=[])
    assert {result.check for result in report.results} == {"W2"}
    assert not any(name.startswith("states.") for name in report.coverage.not_stated)


def test_what_is_not_declared_is_unsupported() -> None:
    report = run_conformance(RIGHT_STATES["plain"], device="cpu", quick=True, only="ST4,ST9")
    assert {result.outcome for result in report.results} == {Outcome.UNSUPPORTED}
    assert "max_rollback=3 not supported (up to 0)" in report.results[0].message


def test_oracle_by_hand() -> None:
    """One head, two tokens, sizes 1: numbers that can be computed on paper."""
    spec = StateSpec(num_heads=1, key_size=1, value_size=1, dtype=torch.float64)
    q, k, v = (
        torch.tensor(x, dtype=torch.float64).reshape(2, 1, 1) for x in ([1, 2], [3, 1], [5, 7])
    )
    half = torch.full((2, 1), 0.5, dtype=torch.float64)
    out, state = recurrence(spec, q, k, v, half.log(), half, scale=10.0)
    # S1 = 0.5 * 5 * 3 = 7.5; S2 = 3.75 + 0.5 * (7 - 3.75) = 5.375
    assert out.flatten().tolist() == pytest.approx([75.0, 107.5])
    assert state.item() == pytest.approx(5.375)
    added, _ = recurrence(
        spec.replace(update="add"), q, k, v, half.log(), None, scale=1.0,
        skip=torch.tensor([2.0]),
    )  # fmt: skip
    assert added.flatten().tolist() == pytest.approx([25.0, 2 * (7.5 + 7) + 14])


def test_oracle_of_convolutions_by_hand() -> None:
    spec = StateSpec(conv_channels=1, conv_width=2, conv_activation=None, dtype=torch.float64)
    x = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    got = convolve(spec, x, torch.tensor([[10.0, 1.0]]), torch.tensor([0.5]))
    assert got.flatten().tolist() == [1.5, 12.5, 23.5]
    silu = convolve(spec.replace(conv_activation="silu"), x, torch.tensor([[0.0, 1.0]]))
    assert silu[1].item() == pytest.approx(2 / (1 + 2.718281828459045**-2))


def test_the_budget_follows_from_the_rounding_of_norms() -> None:
    """T4 allows normalized heads in the dtype of the layer; the second result has them."""
    spec = KINDS["gated delta"].replace(dtype=torch.bfloat16)
    exact, rounded = expected(spec, draw_layer(spec), draw_tokens(spec, 20, 1))
    assert rounded.out.dtype == torch.bfloat16
    error = (rounded.out.double() - exact.out).abs().max() / exact.out.abs().max()
    assert 2**-10 < error < 2**-5
