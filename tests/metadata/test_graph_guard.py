"""The graph guard names tensors that moved between capture and replay (G3)."""

from __future__ import annotations

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.graph_guard import GraphGuard, tensor_addresses
from attnlib.metadata.state import AttentionState
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits
from tests.metadata.test_state import Capturable

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=16)


def _state() -> AttentionState:
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=64)
    return AttentionState(Capturable(SPEC, "cpu", limits=limits), limits)


def _batch() -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths([1, 1], [20, 3], [[1, 2], [3]], 16, "cpu")


def test_batches_over_persistent_buffers_pass() -> None:
    state = _state()
    guard = GraphGuard(state.graph_capture_get_metadata_for_batch(4), include_cpu=True)
    guard.check(state.builder.build(0, state.begin_forward(_batch(), 4)))


def test_each_tensor_of_another_batch_is_named() -> None:
    state = _state()
    guard = GraphGuard(state.graph_capture_get_metadata_for_batch(4), include_cpu=True)
    with pytest.raises(ContractError) as error:
        guard.check(state.builder.build(0, _batch()))
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        assert f"{name} was at 0x" in str(error.value)
    assert "begin_forward" in str(error.value) and "_cpu" not in str(error.value)


def test_other_shapes_and_missing_tensors_are_named() -> None:
    buffer = torch.zeros(8)
    guard = GraphGuard({"a": buffer[:4], "b": buffer}, include_cpu=True)
    findings = guard.moved({"a": buffer[:3], "b": None})
    assert (
        "['a'] had shape (4,)" in findings[0]
        and "['b'] was a tensor at capture and is none now" in findings[1]
    )


def test_cpu_tensors_are_skipped_by_default() -> None:
    guard = GraphGuard({"a": torch.zeros(3)})
    assert guard.moved({"a": torch.zeros(3)}) == []
    assert [name for name, _ in tensor_addresses({"a": torch.zeros(3), "b": 4})] == ["['a']"]


def test_a_batch_that_does_not_fit_the_graph_is_refused() -> None:
    """G1: longer sequences than captured, and masks in tensors that are not persistent."""
    state, batch = _state(), _batch()
    for changes, words in (
        ({"max_seq_len": 65}, "max_seq_len=65 exceeds the 64"),
        ({"causal": torch.tensor([True, False])}, "causal is a tensor of this batch"),
        ({"query_bias": torch.zeros(2, 1)}, "query_bias is a tensor of this batch"),
    ):
        with pytest.raises(ContractError, match=words):
            state.begin_forward(batch.replace(**changes), 4)
