"""Score functions are values: checked when made, hashable, picklable, and refused where a backend
does not support them."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

import attnlib
from attnlib.capabilities import Capabilities, unsupported_reasons
from attnlib.device import resolve_device
from attnlib.errors import ContractError
from attnlib.score_functions import ScoreFunction, lookup, where
from attnlib.score_functions.builtin import (
    documents,
    head_windows,
    multi_item,
    prefix_lm,
)
from attnlib.score_functions.tensor_checks import TAKEN_NAMES
from attnlib.spec import AttentionSpec

BASE = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
TABLE = torch.zeros(3)
FACTOR = 0.5


def decay(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score - FACTOR * (q_pos - k_pos)


def with_tensors(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    shown = k_pos < lookup(aux.limit, request, 0)
    return where(shown, score + lookup(aux.bias, head), float("-inf"))


def reads_global_tensor(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any):
    return score + TABLE[0]


def calls_max(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score + max(q_pos, k_pos)


def calls_math(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score + math.log(2.0)


def four_parameters(score: Any, q_pos: Any, k_pos: Any, head: Any) -> Any:
    return score


def two_values(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    return 0, seq_len


def one_value(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    return seq_len


def causal_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def capturing() -> Any:
    number = 3

    def inner(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
        return score + number

    return inner


WITH_TENSORS = ScoreFunction(with_tensors, layer_tensors=("bias",), batch_tensors=("limit",))


def test_a_score_function_is_a_value() -> None:
    """Equal arguments make equal values, also in another process."""
    assert documents() == documents() and hash(documents()) == hash(documents())
    assert documents() != documents(causal=False)
    spec = AttentionSpec(**BASE, score_function=WITH_TENSORS)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert ScoreFunction(decay, constants={"a": 1}) == ScoreFunction(decay, (("a", 1),))
    assert documents().count_ranges() == 1 and multi_item().count_ranges() == 2
    assert head_windows().count_ranges(by_head=True) == 1 and documents().count_ranges(True) == 0
    assert documents().longest_range() is None and documents(longest=99).longest_range() == 99
    assert documents(causal=False, longest=99).longest_range() == 99
    assert head_windows(1, 2048).longest_range() == 2048
    assert prefix_lm().longest_range() > 1 << 20
    assert str(WITH_TENSORS) == "tests.score_functions.test_function.with_tensors"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScoreFunction(lambda s, q, k, h, r, a: s), "is not found under this name"),
        (lambda: ScoreFunction(capturing()), "captures number: pass numbers as constants"),
        (lambda: ScoreFunction(torch.exp), "is a builtin_function_or_method"),
        (lambda: ScoreFunction(four_parameters), r"it must take 6: \(score, q_pos"),
        (lambda: ScoreFunction(reads_global_tensor), "uses TABLE, a Tensor"),
        (lambda: ScoreFunction(calls_max), "calls max, which kernels cannot: use attnlib"),
        (lambda: ScoreFunction(calls_math), "uses math, a module"),
        (
            lambda: ScoreFunction(decay, bounds=two_values),
            "two_values returns 2 values: return four",
        ),
        (lambda: ScoreFunction(decay, bounds=one_value), "one_value returns int: return four"),
        (
            lambda: ScoreFunction(decay, head_bounds=two_values),
            r"it must take 6: \(q_first, q_last",
        ),
        (
            lambda: ScoreFunction(decay, exact_bounds=True),
            "exact_bounds=True of score function .*decay",
        ),
        (lambda: ScoreFunction(decay, form="both"), "form='both' of a score function must be"),
        (lambda: ScoreFunction(decay, constants={"a b": 1}), "'a b' must be an identifier"),
        (lambda: ScoreFunction(decay, layer_tensors=("values",)), "'values' cannot name a .*tuple"),
        (lambda: ScoreFunction(decay, constants={"type": 1}), "'type' cannot name a .* rename it"),
        (lambda: ScoreFunction(decay, constants={"a": "1"}), "constant a='1' of a score function"),
        (lambda: ScoreFunction(decay, layer_tensors=tuple("abcde")), "has 5 tensors"),
        (
            lambda: ScoreFunction(causal_mod, form="mask_mod", layer_tensors=("a",)),
            "form='mask_mod' has no parameter for a",
        ),
        (lambda: AttentionSpec(**BASE, score_function=decay), "wrap the function: attnlib.score"),
        (
            lambda: AttentionSpec(**BASE, score_function=prefix_lm()),
            "decides about later keys itself, and mask_kind=causal hides them",
        ),
    ],
)
def test_an_impossible_function_is_refused_when_it_is_made(make: Any, message: str) -> None:
    """M10: the message names the function and what to do."""
    with pytest.raises(ContractError, match=message):
        make()


def test_names_that_tuples_of_triton_have_are_refused() -> None:
    """In kernels `aux` is one; the interpreter and torch would find the tensor."""
    language = pytest.importorskip("triton.language")
    made = language.tuple([language.constexpr(1)])
    names = {*dir(made), *vars(made)}
    assert {name for name in names if not name.startswith("_")} == {*TAKEN_NAMES}


def test_backends_that_do_not_state_score_functions_refuse_them() -> None:
    """A foreign backend never computes a layer without its function."""
    spec = AttentionSpec(**BASE, score_function=WITH_TENSORS)
    reasons = unsupported_reasons(spec, resolve_device("cpu"), Capabilities(devices=("cpu",)))
    assert "score_function: not stated by this backend, so not assumed" in reasons
    stated = Capabilities(devices=("cpu",), score_function=False)
    named = [r for r in unsupported_reasons(spec, resolve_device("cpu"), stated) if "with_t" in r]
    assert named == [f"score_function={WITH_TENSORS}: not supported"]


def _layer_and_batch(**score_tensors: torch.Tensor) -> tuple[attnlib.Attention, Any, Any]:
    spec = AttentionSpec(**BASE, score_function=WITH_TENSORS)
    own = {"score_tensors": {"bias": torch.zeros(4)}}
    layer = attnlib.Attention(spec, backend="torch", device="cpu", **own)
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 3], [5, 3], [[1], [2]], 16, "cpu", score_tensors=score_tensors or None
    )
    return layer, common, layer.backend.make_builder(spec, "cpu")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "needs the batch tensor 'limit'"),
        ({"limit": torch.ones(2, 1)}, "is torch.float32; it must be int32"),
        ({"limit": torch.ones(2, dtype=torch.int32)}, r"must be contiguous, \[requests, m\]"),
        ({"limit": torch.ones(3, 1, dtype=torch.int32)}, "has 3 rows; it must have one for each"),
    ],
)
def test_batch_tensors_are_checked_when_the_batch_is_built(tensors: Any, message: str) -> None:
    """M10: before anything is written."""
    _, common, builder = _layer_and_batch(**tensors)
    with pytest.raises(ContractError, match=message):
        builder.build(0, common)


def test_layer_tensors_are_checked_and_owned_by_the_layer() -> None:
    """They are buffers, so that `.to()` and loaded weights reach every call."""
    spec = AttentionSpec(**BASE, score_function=WITH_TENSORS)
    with pytest.raises(ContractError, match="needs the layer tensor 'bias'"):
        attnlib.Attention(spec, backend="torch", device="cpu")
    layer, common, builder = _layer_and_batch(limit=torch.tensor([[9], [9]], dtype=torch.int32))
    assert list(layer.state_dict()) == ["score_bias"]
    cache = attnlib.PagedKVCache.allocate(spec, 4, "cpu")
    batch = builder.build(0, common)
    query, key = torch.randn(4, 4, 32), torch.randn(4, 2, 32)
    first = layer(query, key, key, cache, batch, return_lse=True)[1]
    layer.score_bias.fill_(1.0)
    assert torch.allclose(layer(query, key, key, cache, batch, return_lse=True)[1], first + 1.0)


def test_a_hidden_row_has_no_weights_and_the_mask_comes_last() -> None:
    """M5, M10: output 0 and LSE -inf; a function cannot show a key that the mask hides."""
    layer, common, builder = _layer_and_batch(limit=torch.tensor([[0], [9]], dtype=torch.int32))
    spec = layer.spec
    cache = attnlib.PagedKVCache.allocate(spec, 4, "cpu")
    key = torch.randn(4, 2, 32)
    out, lse = layer(
        torch.randn(4, 4, 32), key, key, cache, builder.build(0, common), return_lse=True
    )
    assert not out[0].any() and bool((lse[0] == -math.inf).all())
    assert torch.isfinite(lse[1:]).all()


def _number(score, q_pos, k_pos, head, request, aux):
    return 1.5


def _nothing(score, q_pos, k_pos, head, request, aux):
    score + 1


def _pair(score, q_pos, k_pos, head, request, aux):
    return score, q_pos


def _always(b, h, q_idx, kv_idx):
    return True


@pytest.mark.parametrize(
    ("function", "form"),
    [(_number, "score"), (_nothing, "score"), (_pair, "score"), (_always, "mask_mod")],
)
def test_a_function_that_returns_no_tile_is_refused_when_it_is_made(function, form) -> None:
    """M10: torch would serve a number, and kernels fail after the cache was written."""
    with pytest.raises(ContractError, match=f"{function.__name__} returns .* whatever"):
        ScoreFunction(function, form=form)
