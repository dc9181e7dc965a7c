"""X4: what a rank computes, for each property of a layer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from attnlib import AttentionSpec
from attnlib.errors import UnsupportedConfigError
from attnlib.parallel import Contiguous, Interleaved
from attnlib.parallel.divisions import Division
from attnlib.parallel.local_spec import Edge, local_form, rejections

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=4)

DECIDED = """
    num_heads num_kv_heads head_size head_size_v dtype kv_cache_dtype kv_scale_kind block_size
    kv_cache_layout attn_type mask_kind sliding_window window attention_chunk_size logits_soft_cap
    has_alibi has_sink score_function key_selection compressed_entries allow_fp8_queries use_mla
    needs_lse kv_sharing batch_invariant cudagraph kv_rotation value_cache_dtype token_sinks
""".split()
"""Fields of `AttentionSpec` that divided layers keep, convert or refuse."""


def test_every_field_of_the_spec_is_decided() -> None:
    """A new field needs a case in `tests/parallel/cases.py`, or a reason in `rejections`."""
    assert {field.name for field in fields(AttentionSpec)} <= set(DECIDED)


@pytest.mark.parametrize(
    ("changes", "division", "edge", "window"),
    [
        ({}, Interleaved(2), Edge.START, None),
        ({"sliding_window": 12}, Interleaved(2, 3), Edge.WINDOW, (5, None)),
        ({"sliding_window": 11}, Interleaved(2), Edge.FUNCTION, None),
        ({"sliding_window": 12}, Contiguous(2, 40), Edge.FUNCTION, None),
        ({"sliding_window": 12, "mask_kind": "bidirectional"}, Interleaved(2), Edge.FUNCTION, None),
        ({"window": (None, 0), "mask_kind": "bidirectional"}, Interleaved(2), Edge.START, None),
        ({"attention_chunk_size": 16}, Interleaved(2, 4), Edge.START, None),
        ({"attention_chunk_size": 12}, Interleaved(2, 2), Edge.FUNCTION, None),
        ({"attention_chunk_size": 8}, Contiguous(2, 40), Edge.START, None),
        ({"attention_chunk_size": 8}, Contiguous(2, 38), Edge.FUNCTION, None),
        ({"has_alibi": True}, Interleaved(2), Edge.FUNCTION, None),
    ],
)
def test_the_first_visible_key(
    changes: dict[str, Any], division: Division, edge: Edge, window: Any
) -> None:
    form = local_form(SPEC.replace(**changes), division, 1)
    assert form.edge is edge
    assert (form.spec.window and tuple(form.spec.window)) == window
    assert form.by_row == bool(changes)
    assert form.spec.num_heads == 8
    assert form.spec.needs_lse
    assert not (form.spec.has_sink or form.spec.has_alibi)


def test_all_reasons_at_once() -> None:
    spec = SPEC.replace(attn_type="encoder_decoder", mask_kind="per_request")
    (reason,) = rejections(SPEC.replace(token_sinks=True))
    assert "token_sinks=True" in reason
    with pytest.raises(UnsupportedConfigError) as caught:
        local_form(spec, Interleaved(2), 0)
    assert len(caught.value.reasons) == 2
    assert "run this layer on one rank" in str(caught.value)
