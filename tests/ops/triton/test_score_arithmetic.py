"""Changed score functions compute what the original ones do; which functions change, and how."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from attnlib.backends.triton import TritonBackend
from attnlib.ops.triton.launch.score_compile import compile_score
from attnlib.ops.triton.launch.score_source import device_source
from attnlib.score_functions import ScoreFunction, lookup, sqrt, where
from attnlib.score_functions.checks import loaded_globals
from attnlib.testing.case import Case
from attnlib.testing.runner import compare_with_oracle, run_case
from attnlib.testing.score_functions import SUITE, load_score_function, make_score_tensors
from tests.ops.triton.test_score_functions import drawn_source

SCALE = 0.25
window = torch.zeros(2)
"""Not what `aux.window` is."""
STEP = 3


def decay(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    """A docstring."""
    return score - (q_pos - k_pos) * (head + 1) * 0.0001


def bias(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    """Attributes with the names of this function, of a global tensor, and of a builtin."""
    near = q_pos - k_pos < lookup(aux.window, head)
    return where(near, score + lookup(aux.bias, head), score - aux.max)


def _tensors(num_heads: int, seq_lens: Sequence[int]) -> dict[str, torch.Tensor]:
    heads = torch.arange(num_heads, dtype=torch.int32)
    return {"bias": heads * 0.5, "window": heads + 3}


NAMES = ScoreFunction(
    bias, constants=(("max", 2),), layer_tensors=("bias", "window"), examples=_tensors
)


def with_locals(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    distance_ = q_pos - k_pos
    near = distance_ // STEP < 4
    changed = score - distance_ * 0.5 + where(near, 1.0, 0.0)
    return where(k_pos % 2 == 0, changed, float("-inf"))


def squared(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return -score * score + sqrt(abs(q_pos - k_pos)) / 8


def with_branch(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    if STEP > 2:
        score = score - (q_pos - k_pos) * 0.5
    return score


def names_distance(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score - distance(q_pos) * (q_pos - k_pos) * 0.5


def distance(x: Any) -> Any:
    return x * 2


def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx - kv_idx < 9, score, score - 0.5 * h * (q_idx - kv_idx))


def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx < 7) | (kv_idx % 4 == h)


def _source(function: Any, form: str = "score", variant: str = "scores") -> str | None:
    copy = device_source(function, loaded_globals(function), form, variant)
    return None if copy is None else ast.unparse(ast.parse(inspect.getsource(copy)).body[0])


def _body(function: Any, form: str = "score", variant: str = "scores") -> list[str]:
    source = _source(function, form, variant)
    assert source is not None
    return [line.strip() for line in source.splitlines()[1:]]


def test_a_difference_becomes_floating_point_and_factors_of_a_row_are_multiplied_first() -> None:
    assert _body(decay) == ["return score - distance(q_pos, k_pos) * ((head + 1) * 0.0001)"]
    assert _body(decay, variant="products") == [
        "return score - distance(q_pos, k_pos) * ((head + 1) * 0.0001 * inverse_scale)"
    ]


def test_the_slope_of_a_function_that_is_linear_in_the_position_of_the_key() -> None:
    """The kernel evaluates such a function once per row and multiplies the slope by columns."""
    assert _body(decay, variant="slope") == [
        "return -1.0 * ((head + 1) * 0.0001 * inverse_scale * -1.0)"
    ]
    assert _body(linear, variant="slope") == [
        "weight = lookup(aux.bias, head)",
        "return weight * 0.5 * inverse_scale * -1.0 + 0.25 * inverse_scale * 1.0",
    ]
    for function in (with_locals, squared, looked_up, hidden):
        assert _source(function, variant="slope") is None


def test_integers_remain_integers() -> None:
    """The local variable is an operand of // and a factor."""
    assert _body(with_locals, variant="products") == [
        "distance_ = q_pos - k_pos",
        "near = distance_ // STEP < 4",
        "changed = score - distance(q_pos, k_pos) * (0.5 * inverse_scale)"
        " + where(near, 1.0, 0.0) * inverse_scale",
        "return where(k_pos % 2 == 0, changed, float('-inf'))",
    ]
    relative_bias = load_score_function(SUITE["relative_bias"][0]).function
    (body,) = _body(relative_bias)
    assert body == "return score + lookup(aux.bias, head, q_pos - k_pos + aux.max_distance)"


def test_functions_that_are_not_linear_in_the_score_take_scores() -> None:
    assert _body(squared) == ["return -score * score + sqrt(abs(distance(q_pos, k_pos))) / 8"]
    assert _source(squared, variant="products") is None
    finite = load_score_function(SUITE["finite"][0]).function
    assert _source(finite, variant="products") is None


def assigns_twice(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    changed = score
    changed = (q_pos - k_pos) * 0.5
    return changed


def two_targets(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    first = second = score - (q_pos - k_pos) * 0.5
    return where(k_pos > 1, first, second)


@pytest.mark.parametrize("function", [with_branch, names_distance, assigns_twice, two_targets])
def test_other_functions_are_left_as_they_are(function: Any) -> None:
    """Control flow, other assignments, and a global with the name of the device function."""
    assert "distance(q_pos, k_pos)" not in str(_source(function))
    assert _source(function, variant="products") is None


def _evaluate(function: ScoreFunction, copy: Any, score: torch.Tensor, *more: Any) -> torch.Tensor:
    """A copy on float64 scores of 3 heads, 11 queries and 13 keys; as `ScoreFunction.evaluate`."""
    called = {
        **function.function.__globals__,
        "distance": lambda q_pos, k_pos: (q_pos - k_pos).double(),
    }
    copy = FunctionType(copy.__code__, called)
    head, q_pos, k_pos = (
        torch.arange(3)[:, None, None],
        torch.arange(2, 13)[:, None],
        torch.arange(13),
    )
    tensors = make_score_tensors(function, 3, [13])
    if function.form == "score_mod":
        changed = copy(score, 0, head, q_pos, k_pos, *more)
    else:
        aux = function.namespace(tensors)
        changed = copy(score, q_pos, k_pos, head, 0, aux, *more)
    return torch.as_tensor(changed).double().expand(score.shape)


def _check(function: ScoreFunction) -> bool:
    """Compare both copies with the original; returns whether the function takes raw products."""
    product = torch.randn(
        3, 11, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    used = loaded_globals(function.function)
    original = _evaluate(function, function.function, product * SCALE)
    natural = device_source(function.function, used, function.form)
    torch.testing.assert_close(
        _evaluate(function, natural, product * SCALE), original, rtol=1e-6, atol=1e-6
    )
    raw = device_source(function.function, used, function.form, "products")
    if raw is None:
        return False
    found = _evaluate(function, raw, product, 1 / SCALE) * SCALE
    torch.testing.assert_close(found, original, rtol=1e-6, atol=1e-6)
    slope = device_source(function.function, used, function.form, "slope")
    if slope is not None:
        changed = found - product * SCALE
        expected = _evaluate(function, slope, product, 1 / SCALE) * SCALE
        torch.testing.assert_close(changed.diff(dim=2), expected[..., 1:], rtol=1e-5, atol=1e-5)
    return True


@pytest.mark.parametrize("name", SUITE)
def test_functions_of_the_suite(name: str) -> None:
    assert _check(load_score_function(SUITE[name][0])) == (
        name not in ("finite", "heads", "after_cap_and_alibi", "after_bias")
    )


def test_other_signatures() -> None:
    assert _check(ScoreFunction(decay))
    assert _check(ScoreFunction(score_mod, form="score_mod"))
    assert _body(mask_mod, "mask_mod", variant="products") == _body(mask_mod, "mask_mod")


@pytest.mark.parametrize("seed", range(40))
def test_drawn_functions(seed: int, tmp_path: Path) -> None:
    file = tmp_path / f"changed_score_function_{seed}.py"
    file.write_text(drawn_source(seed))
    _check(load_score_function(f"{file}:drawn"))


def linear(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    weight = lookup(aux.bias, head)
    difference = q_pos - k_pos
    return score + difference * weight * 0.5 + (k_pos * 0.25 + weight)


def hidden(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return where(k_pos > 3, score - (q_pos - k_pos) * 0.5, float("-inf"))


def test_a_lookup_of_two_dimensions_is_divided_by_the_scale() -> None:
    assert _body(looked_up, variant="products") == [
        "return score + lookup(aux.bias, head, q_pos - k_pos) * (0.5 * inverse_scale)"
    ]


def looked_up(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return 0.5 * lookup(aux.bias, head, q_pos - k_pos) + score


def test_names_of_attributes_are_no_globals(device: torch.device) -> None:
    case = Case(head_size=32, score=f"{__name__}:NAMES", batch="q1s30_q19s23")
    assert not compare_with_oracle(case, run_case(TritonBackend, case, device), device)
    function = compile_score(NAMES, "triton").apply.fn.__globals__["FUNCTION"].fn
    assert function.__globals__.keys() & {"bias", "window", "max"} == set()
