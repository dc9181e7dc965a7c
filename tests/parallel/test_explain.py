"""`explain_parallel` names the form of a rank's part, backends, and reasons."""

from __future__ import annotations

import torch

from attnlib import AttentionSpec
from attnlib.parallel import Contiguous, Interleaved, ZigZag, explain_parallel

SPEC = AttentionSpec(
    num_heads=8, num_kv_heads=1, head_size=128, dtype=torch.float32, sliding_window=64
)


def test_a_layer_that_can_be_divided() -> None:
    """X4, X6: 4 ranks; queries of 3 of them have 8 heads of 512 bytes."""
    text = explain_parallel(SPEC, Interleaved(4, 16), device="cpu")
    assert "32 heads, each new token is a request" in text
    assert "a window of local keys" in text
    assert "all_to_all: 12288 bytes of queries and 12384 of results" in text
    assert "attnlib chose torch" in text


def test_a_backend_that_cannot_find_the_first_key_is_named() -> None:
    text = explain_parallel(SPEC, Contiguous(4, 100), device="H200", backend="flash_attn")
    assert "a score function" in text
    assert "score_function=" in text and "not supported" in text


def test_reasons_against_a_layer() -> None:
    text = explain_parallel(SPEC.replace(mask_kind="per_request"), ZigZag(2, 4), device="cpu")
    assert "refused   mask_kind=per_request" in text
