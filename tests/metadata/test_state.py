"""Persistent state of a runner (G3)."""

import pytest
import torch

from attnlib.backends.torch.metadata import TorchMetadataBuilder
from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.state import AttentionState
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=4)


def _batch(queries: list[int], sequences: list[int], **changes) -> CommonAttentionMetadata:
    table = [[8 * r + j for j in range(-(-s // 4))] for r, s in enumerate(sequences)]
    return CommonAttentionMetadata.from_lengths(queries, sequences, table, 4, "cpu", **changes)


def test_state_pads_a_batch_into_persistent_buffers() -> None:
    """M7, G3: padding rows are query_len 0, seq_len 0, slot -1, and addresses never change."""
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=8, max_seq_len=32)
    state = AttentionState(TorchMetadataBuilder(SPEC, "cpu"), limits)
    addresses = {
        name: buffer.data_ptr() for name, buffer in state.get_graph_input_buffers().items()
    }
    captured = state.graph_capture_get_metadata_for_batch(4)
    padded = state.begin_forward(_batch([1, 1], [9, 2]), 4)
    assert padded.query_start_loc.tolist() == padded.query_start_loc_cpu.tolist() == [0, 1, 2, 2, 2]
    assert padded.seq_lens.tolist() == padded.seq_lens_cpu.tolist() == [9, 2, 0, 0]
    assert padded.slot_mapping.tolist() == [8, 33, -1, -1] and padded.max_seq_len == 32
    assert padded.seq_lens.data_ptr() == captured.seq_lens.data_ptr()
    assert {
        name: buffer.data_ptr() for name, buffer in state.get_graph_input_buffers().items()
    } == addresses
    clone = state.graph_clone(2)
    assert (
        clone.limits.max_num_reqs == 2
        and clone.get_graph_input_buffers()["seq_lens"].data_ptr() != addresses["seq_lens"]
    )


@pytest.mark.parametrize(
    ("queries", "sequences", "reqs", "message"),
    [
        ([1, 1, 1], [3, 3, 3], 2, "3 requests of up to 1 tokens do not fit a graph captured for 2"),
        ([2], [3], 2, "up to 2 tokens do not fit"),
        ([1], [60], 2, "block_table has 15 columns, the captured one has 8"),
        ([1], [3], 9, "9 requests of 1 tokens exceed the limits"),
    ],
)
def test_state_refuses_what_does_not_fit(
    queries: list[int], sequences: list[int], reqs: int, message: str
) -> None:
    state = AttentionState(
        TorchMetadataBuilder(SPEC, "cpu"),
        BatchLimits(max_num_reqs=4, max_num_tokens=8, max_seq_len=32),
    )
    with pytest.raises(ContractError, match=message):
        state.begin_forward(_batch(queries, sequences), reqs)
