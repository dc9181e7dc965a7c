"""The spec validates itself and is a hashable value."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.score_functions import ScoreFunction
from attnlib.selection import load_backend
from attnlib.spec import AttentionSpec, Window

BASE = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_heads": 7}, "num_heads=7 is not a multiple of num_kv_heads=2"),
        ({"head_size": 0}, "head_size=0 must be an integer of at least 1"),
        ({"num_heads": -8}, "num_heads=-8 must be"),
        ({"block_size": 0}, "block_size=0 must be"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"sliding_window": 2.5}, "sliding_window=2.5 must be at least 1"),
        ({"sliding_window": True}, "sliding_window=True must be at least 1"),
        ({"attention_chunk_size": 1.5}, "attention_chunk_size=1.5 must be an integer"),
        ({"window": (2.5, 0)}, "window left=2.5 must not be negative, and an integer"),
        ({"window": 3}, "window=3 must be a pair (left, right)"),
        ({"logits_soft_cap": "30"}, "logits_soft_cap='30' must be above 0"),
        ({"logits_soft_cap": float("nan")}, "logits_soft_cap=nan must be above 0"),
        ({"mask_kind": "tree"}, "mask_kind='tree' is not known: give one of causal"),
        ({"attn_type": "cross"}, "attn_type='cross' is not known: give one of decoder"),
        ({"cudagraph": 7}, "cudagraph=7 is not known: give one of 0, 1"),
        ({"has_sink": "no"}, "has_sink='no' must be True or False"),
        (
            {"allow_fp8_queries": True, "kv_cache_dtype": "fp8_e5m2"},
            "queries are rounded to the elements of an e4m3 cache",
        ),
        (
            {"allow_fp8_queries": True, "kv_cache_dtype": "fp8_e4m3", "batch_invariant": True},
            "allow_fp8_queries=True with batch_invariant=True",
        ),
        ({"window": (-1, 0)}, "window left=-1 must not be negative"),
        ({"window": (None, -5)}, "window right=-5 must not be negative"),
        ({"window": (3, 0), "sliding_window": 4}, "are both given: give one of them"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap=0.0 must be above 0"),
        ({"logits_soft_cap": 1e30}, r"logits_soft_cap=1e\+30 must be above 0 and at most 8192"),
        ({"logits_soft_cap": float("inf")}, "logits_soft_cap=inf must be above 0 and at most"),
        ({"attention_chunk_size": 0}, "attention_chunk_size=0 must be"),
        ({"dtype": torch.int8}, "dtype=torch.int8 must be a floating-point"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' must be"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype='fp4' is not known"),
        ({"kv_scale_kind": "token"}, "kv_scale_kind='token' must be"),
        ({"use_mla": True}, "use_mla needs num_kv_heads=1"),
    ],
)
def test_an_impossible_value_is_named_with_its_limit(wrong: dict, message: str) -> None:
    with pytest.raises(ContractError, match=message.replace("(", r"\(").replace(")", r"\)")):
        AttentionSpec(**{**BASE, **wrong})


def _by_score(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score * score * 0.1


def _by_positions(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score - (q_pos - k_pos) * 0.007


def _is_near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx < 4


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sliding_window": 4}, "sliding_window=4"),
        ({"window": (3, None)}, "window=(3, None)"),
        ({"attention_chunk_size": 8}, "attention_chunk_size=8"),
        ({"has_alibi": True}, "has_alibi=True"),
        ({"score_function": ScoreFunction(_by_positions)}, "score_function="),
        ({"score_function": ScoreFunction(_is_near, form="mask_mod")}, "score_function="),
    ],
)
def test_a_tree_mask_takes_nothing_that_counts_positions(fields: dict, named: str) -> None:
    """M3: rows of a tree share positions, so a window over rows shows other keys than sequential
    decoding."""
    with pytest.raises(ContractError, match=re.escape(named) + ".* in a tree of tokens") as caught:
        AttentionSpec(**BASE, mask_kind="query_bias", **fields)
    assert caught.value.rule == "M20"


def test_a_tree_mask_takes_functions_of_scores_and_full_windows() -> None:
    for fields in (
        {"score_function": ScoreFunction(_by_score)},
        {"window": (None, None)},
        {"logits_soft_cap": 30.0, "has_sink": True},
    ):
        AttentionSpec(**BASE, mask_kind="query_bias", **fields)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_batch_with_a_bias_needs_a_layer_with_such_a_mask(backend: str) -> None:
    """Else a causal layer with a window would take a tree by its batch alone."""
    spec = AttentionSpec(**BASE, sliding_window=4)
    builder = load_backend(backend).make_builder(spec, "cpu")
    batch = CommonAttentionMetadata.from_lengths(
        [3], [9], [[0]], 16, "cpu", query_bias=torch.zeros(3, 3)
    )
    with pytest.raises(ContractError, match="query_bias is given, but .*mask_kind=causal"):
        builder.build(0, batch)


def test_windows_in_the_general_form() -> None:
    """M2: W keys including the query's own; |p - k| < W in bidirectional layers; 0 is a window."""
    assert AttentionSpec(**BASE).visible_window == Window(None, None)
    assert AttentionSpec(**BASE, sliding_window=5).visible_window == Window(4, 0)
    assert AttentionSpec(**BASE, sliding_window=1).visible_window == Window(0, 0)
    assert AttentionSpec(
        **BASE, sliding_window=5, attn_type="encoder_only"
    ).visible_window == Window(4, 4)
    assert Window(0, None).as_kernel_args() == (0, -1)


def test_a_spec_is_a_value() -> None:
    """It can be a dictionary key and can be pickled."""
    spec = AttentionSpec(**BASE, kv_cache_dtype="fp8")
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec and hash(again) == hash(spec) and again.kv_dtype == torch.float8_e4m3fn
    assert spec.replace(head_size=128).head_size == 128
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.head_size = 1  # type: ignore[misc]
