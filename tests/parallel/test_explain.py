"""`explain_parallel` names the form of a rank's part, backends, and reasons."""

from __future__ import annotations

import re

import torch

from attnlib import AttentionSpec
from attnlib.backends.composite import make_composite
from attnlib.backends.torch import TorchBackend
from attnlib.parallel import Contiguous, Interleaved, ZigZag, explain_parallel
from tests.testing.toy_backend import ToyBackend

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


def test_parts_of_a_backend_for_decodes() -> None:
    """X4: the toy backend has no attention to the keys of another sequence."""
    spec, division = SPEC.replace(sliding_window=None), Interleaved(4)
    pair = make_composite(TorchBackend, ToyBackend)
    text = explain_parallel(spec, division, device="cpu", backend=pair)
    found = re.findall(r"\n  (\w[^\n]*):\n    attnlib chose (\S+)", text)
    assert dict(found) == {
        "keys of a rank": "toy",
        "context of prefills": "torch",
        "new tokens of prefills": "torch",
    }
    alone = explain_parallel(spec, division, device="cpu", backend=ToyBackend)
    assert "each new token is a request" in alone
    assert "prefills" not in alone
