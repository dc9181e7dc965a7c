"""What the base class of builders checks before any `build`, also of a plug-in's builder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.torch.metadata import TorchMetadata, TorchMetadataBuilder
from attnlib.backends.triton.metadata import TritonMetadataBuilder
from attnlib.errors import ContractError
from attnlib.metadata.builder import AttentionMetadataBuilder
from attnlib.metadata.paged import paged_fields
from tests.testing.golden_v1_backend import GoldenBuilder

SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=8
)
LIMITS = attnlib.BatchLimits(max_num_reqs=3, max_num_tokens=10, max_seq_len=32)


class Own(AttentionMetadataBuilder[TorchMetadata]):
    """A builder that overrides every way to build, and calls no method of the base class."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False):
        return TorchMetadata(**paged_fields(common_attn_metadata, self.spec, 1))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any):
        return TorchMetadata(**paged_fields(common_attn_metadata, self.spec, 1))

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int):
        return TorchMetadata(**paged_fields(common_attn_metadata, self.spec, 1))


BUILDERS = [TorchMetadataBuilder, TritonMetadataBuilder, GoldenBuilder, Own]
WAYS = {
    "build": lambda builder, common: builder.build(0, common),
    "by name": lambda builder, common: builder.build(
        common_prefix_len=0, common_attn_metadata=common, fast_build=True
    ),
    "capture": lambda builder, common: builder.build_for_cudagraph_capture(common),
    "draft": lambda builder, common: builder.build_for_drafting(common, 0),
}


def _common(queries: list[int], lengths: list[int], **more: Any) -> attnlib.CommonAttentionMetadata:
    size = more.pop("block_size", 8)
    table = torch.arange(len(queries) * 8).view(-1, 8)
    return attnlib.CommonAttentionMetadata.from_lengths(
        queries, lengths, table, size, "cpu", **more
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("builder_cls", BUILDERS)
@pytest.mark.parametrize(
    ("common", "message"),
    [
        (_common([1] * 4, [5] * 4), "num_reqs=4 .* max_num_reqs=3"),
        (_common([4, 7], [9, 9]), "num_actual_tokens=11 .* max_num_tokens=10"),
        (_common([1], [5], max_query_len=11), "max_query_len=11 .* max_num_tokens=10"),
        (_common([1], [33]), "max_seq_len=33 .* max_seq_len=32"),
        (_common([1], [5], max_seq_len=33), "max_seq_len=33 .* max_seq_len=32"),
        (_common([2], [2], block_size=2), "block_size=2, the layers have block_size=8"),
    ],
    ids=["requests", "tokens", "query length", "length", "bound", "block size"],
)
def test_batches_outside_the_limits_are_refused(
    builder_cls: Any, way: str, common: Any, message: str
) -> None:
    """BatchLimits are those of every backend: an engine fails on a CPU as it would on a GPU."""
    builder = builder_cls(SPEC, "cpu", limits=LIMITS)
    with pytest.raises(ContractError, match=message):
        WAYS[way](builder, common)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("builder_cls", BUILDERS)
def test_the_largest_batch_is_built(builder_cls: Any, way: str) -> None:
    common = _common([1, 2, 7], [32, 2, 7])
    built = WAYS[way](builder_cls(SPEC, "cpu", limits=LIMITS), common)
    assert built.num_actual_tokens == 10
    assert builder_cls(SPEC, "cpu").build(0, _common([1] * 9, [60] * 9)).max_seq_len == 60


def test_the_block_size_of_other_tensors_is_not_known() -> None:
    """A batch that an engine gives another table keeps no block size."""
    common = _common([2], [2], block_size=2)
    other = common.replace(
        block_table_tensor=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.tensor([0, 1]),
    )
    assert (common.block_size, other.block_size) == (2, None)
    assert common.slice_requests(0, 1).block_size == common.unpadded(1, 2).block_size == 2
    assert TorchMetadataBuilder(SPEC, "cpu").build(0, other).slot_mapping.tolist() == [0, 1]
    again = other.replace(slot_mapping=torch.tensor([0, 1]), block_size=4)
    with pytest.raises(ContractError, match="block_size=4"):
        TorchMetadataBuilder(SPEC, "cpu").build(0, again)
