"""The spec validates itself and is a hashable value."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from attnlib.errors import ContractError
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
        ({"skip_softmax_threshold": 0.0}, "skip_softmax_threshold=0.0 must be above 0 and below"),
        ({"skip_softmax_threshold": 1.0}, "skip_softmax_threshold=1.0 must be above 0 and below"),
        (
            {"skip_softmax_threshold": 0.1, "batch_invariant": True},
            "skip_softmax_threshold=0.1 with batch_invariant=True",
        ),
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
