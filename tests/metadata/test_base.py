"""Builders: copies of metadata, and which batches can be captured."""

import pytest
import torch

from attnlib.backends.torch.metadata import TorchMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec, CudaGraphSupport

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=4)


def _batch(queries: list[int], sequences: list[int], **changes) -> CommonAttentionMetadata:
    table = [[8 * r + j for j in range(-(-s // 4))] for r, s in enumerate(sequences)]
    return CommonAttentionMetadata.from_lengths(queries, sequences, table, 4, "cpu", **changes)


def test_zero_copy_dict_and_other_blocks() -> None:
    builder = TorchMetadataBuilder(SPEC, "cpu")
    built = builder.build(0, _batch([1], [9]))
    assert built.asdict_zerocopy()["seq_lens"] is built.seq_lens
    assert "seq_lens" not in built.asdict_zerocopy({"seq_lens"})
    other = builder.update_block_table(built, built.block_table + 1, built.slot_mapping + 4)
    assert (
        other.seq_lens is built.seq_lens
        and other.block_table.tolist() == (built.block_table + 1).tolist()
    )


@pytest.mark.parametrize(
    ("level", "queries", "fits"),
    [
        (CudaGraphSupport.NEVER, [1, 1], False),
        (CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, [1, 1], True),
        (CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, [2, 2], False),
        (CudaGraphSupport.UNIFORM_BATCH, [2, 2, 0], True),
        (CudaGraphSupport.UNIFORM_BATCH, [2, 1], False),
        (CudaGraphSupport.ALWAYS, [2, 9], True),
    ],
)
def test_what_can_be_captured(level: CudaGraphSupport, queries: list[int], fits: bool) -> None:
    builder = TorchMetadataBuilder(SPEC, "cpu")
    builder.cudagraph_support = level
    assert builder.can_run_in_cudagraph(_batch(queries, [q + 4 for q in queries])) is fits
    assert builder.full_cudagraph_supported is (level is CudaGraphSupport.ALWAYS)
