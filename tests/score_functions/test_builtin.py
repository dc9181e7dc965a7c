"""The functions of common models, compared with definitions in plain Python; their bounds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnlib.score_functions import ScoreFunction, builtin
from attnlib.score_functions.builtin import t5_relative_bias

LENGTH = 40
Visible = Callable[[int, int, dict[str, Any]], bool]


def _in_span(q: int, k: int, aux: dict[str, Any]) -> bool:
    return bool(aux["span_begin"][0, q] <= k < aux["span_end"][0, q])


def _depth(token: int, aux: dict[str, Any]) -> int:
    """The position of a token in the tree of the example."""
    context = int(aux["tree"][0, 0])
    return token if token < context else int(aux["tree"][0, 1 + token - context])


VISIBLE: dict[str, tuple[ScoreFunction, Visible]] = {
    "prefix_lm": (
        builtin.prefix_lm(),
        lambda q, k, aux: k <= q or k < aux["prefix_len"][0, 0],
    ),
    "spans": (
        builtin.bidirectional_spans(),
        lambda q, k, aux: k <= q or _in_span(q, k, aux),
    ),
    "windowed_spans": (
        builtin.bidirectional_spans(window=4),
        lambda q, k, aux: q - 4 < k <= q or _in_span(q, k, aux),
    ),
    "retained_window": (
        builtin.retained_window(3),
        lambda q, k, aux: bool(k < aux["prefix_len"][0, 0] or q - k < 3),
    ),
    "documents": (
        builtin.documents(causal=False),
        lambda q, k, aux: bool(aux["document_begin"][0, q] == aux["document_begin"][0, k]),
    ),
    "causal_documents": (
        builtin.documents(),
        lambda q, k, aux: bool(k >= aux["document_begin"][0, q]),
    ),
    "multi_item": (
        builtin.multi_item(),
        lambda q, k, aux: bool(k < aux["prefix_len"][0, 0] or k >= aux["item_begin"][0, q]),
    ),
    "block_diffusion": (
        builtin.block_diffusion(8),
        lambda q, k, aux: k // 8 <= q // 8,
    ),
    "tree": (
        builtin.speculative_tree(window=6, chunk_size=16),
        lambda q, k, aux: (
            _depth(q, aux) - _depth(k, aux) < 6 and _depth(q, aux) // 16 == _depth(k, aux) // 16
        ),
    ),
    "head_windows": (
        builtin.head_windows(1, 16),
        lambda q, k, aux: bool(q - k < aux["window"][2]),
    ),
}


def _tensors(function: ScoreFunction) -> dict[str, torch.Tensor]:
    return {} if function.examples is None else dict(function.examples(4, [LENGTH]))


def _evaluated(function: ScoreFunction, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[1, L, L]`: the new scores of head 2, all 0 before."""
    positions = torch.arange(LENGTH)
    scores = torch.zeros(1, LENGTH, LENGTH)
    head = torch.tensor([2])[:, None, None]
    return function.evaluate(scores, positions[:, None], positions, head, 0, tensors)


@pytest.mark.parametrize("name", VISIBLE)
def test_visible_keys_follow_the_definition(name: str) -> None:
    function, visible = VISIBLE[name]
    aux = _tensors(function)
    if name == "spans":
        aux |= _tensors(builtin.bidirectional_spans(window=4))
    found = _evaluated(function, aux)[0] == 0
    expected = [[visible(q, k, aux) for k in range(LENGTH)] for q in range(LENGTH)]
    assert found.tolist() == expected
    assert 0 < int(found.sum()) < LENGTH * LENGTH


def _union(ranges: list[tuple[int, int]]) -> torch.Tensor:
    """The positions in any of the ranges."""
    positions, found = torch.arange(LENGTH), torch.zeros(LENGTH, dtype=torch.bool)
    for first, last in ranges:
        found |= (positions >= first) & (positions < last)
    return found


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("name", [name for name, (fn, _) in VISIBLE.items() if fn.bounds])
def test_bounds_hold_and_contain_those_of_fewer_queries(name: str, by_head: bool) -> None:
    """M10: nothing visible outside, nothing changed inside; of each head, or of all heads."""
    function, _ = VISIBLE[name]
    called: Any = function.head_bounds if by_head else function.bounds
    if called is None:
        pytest.skip("the function has no bounds for one head")
    tensors = _tensors(function)
    positions, heads = torch.arange(LENGTH), torch.arange(4)[:, None, None]
    scores = torch.zeros(4, LENGTH, LENGTH)
    changed = function.evaluate(scores, positions[:, None], positions, heads, 0, tensors)
    draw = random.Random(0)

    def bounds(first: int, last: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        one_head = (head,) if by_head else ()
        found = called(first, last, LENGTH, *one_head, 0, function.namespace(tensors))
        assert len(found) == 4 * function.count_ranges(by_head)
        ranges = [tuple(int(value) for value in found[i : i + 4]) for i in range(0, len(found), 4)]
        assert sorted(first for first, *_ in ranges) == [first for first, *_ in ranges]
        return _union([r[:2] for r in ranges]), _union([r[2:] for r in ranges])

    narrow = 0
    for number in range(200):
        low, high = sorted(draw.sample(range(LENGTH), 2))
        head = number % 4
        shown, same = bounds(low, high, head)
        rows = changed[head if by_head else slice(None), low : high + 1]
        causal = positions <= positions[low : high + 1, None]
        if function.needs_bidirectional:
            causal = torch.ones_like(causal)
        assert bool(((rows == -math.inf) | ~causal)[..., ~shown].all())
        assert bool(((rows == 0) | ~causal)[..., same].all())
        inner, inner_same = bounds(low, draw.randint(low, high), head)
        assert not bool((inner & ~shown).any()) and not bool((same & ~inner_same).any())
        narrow += not bool(shown.all())
    assert narrow


@pytest.mark.parametrize("name", [name for name, (fn, _) in VISIBLE.items() if fn.exact_bounds])
def test_exact_bounds_of_one_query_define_the_function(name: str) -> None:
    """M10: the visible range and the unchanged range of one query are equal."""
    function, _ = VISIBLE[name]
    tensors, by_head = _tensors(function), function.head_bounds is not None
    called: Any = function.head_bounds if by_head else function.bounds
    positions, heads = torch.arange(LENGTH), torch.arange(4)[:, None, None]
    scores = torch.zeros(4, LENGTH, LENGTH)
    changed = function.evaluate(scores, positions[:, None], positions, heads, 0, tensors)
    for q, head in itertools.product(range(LENGTH), range(4)):
        one_head = (head,) if by_head else ()
        found = called(q, q, LENGTH, *one_head, 0, function.namespace(tensors))
        first, last, same_first, same_last = (int(value) for value in found)
        assert (first, last) == (same_first, same_last)
        assert torch.equal(_union([(first, last)]), changed[head, q] == 0)


def test_relative_bias_is_that_of_t5() -> None:
    """The buckets are those of transformers."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    weight = torch.randn(32, 3)
    for bidirectional in (True, False):
        table = t5_relative_bias(weight, bidirectional=bidirectional)
        far = 2 * 128 + 30
        distance = torch.arange(far)[None] - torch.arange(far)[:, None]  # k - q
        buckets = t5._relative_position_bucket(distance, bidirectional, 32, 128)
        expected = weight[buckets].permute(2, 0, 1)
        function = builtin.relative_bias(128)
        q, k = torch.arange(far)[:, None], torch.arange(far)
        scores = torch.zeros(3, far, far)
        heads = torch.arange(3)[:, None, None]
        found = function.evaluate(scores, q, k, heads, 0, {"bias": table})
        assert torch.equal(found, expected)


def test_alibi_sqrt() -> None:
    function = builtin.alibi_sqrt()
    found = _evaluated(function, _tensors(function))[0]
    slope = float(_tensors(function)["slope"][2])
    expected = [[-slope * math.sqrt(abs(q - k)) for k in range(LENGTH)] for q in range(LENGTH)]
    assert torch.allclose(found, torch.tensor(expected))
