"""Paged metadata: the decode part and the prefill part of a batch."""

import pytest
import torch

from attnlib.backends.torch.metadata import TorchMetadataBuilder
from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import paged_fields
from attnlib.spec import AttentionSpec

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=4)


def _batch(queries: list[int], sequences: list[int], **changes) -> CommonAttentionMetadata:
    table = [[8 * r + j for j in range(-(-s // 4))] for r, s in enumerate(sequences)]
    return CommonAttentionMetadata.from_lengths(queries, sequences, table, 4, "cpu", **changes)


def test_a_mixed_batch_has_two_parts() -> None:
    built = TorchMetadataBuilder(SPEC, "cpu").build(
        0, _batch([1, 2, 20], [9, 2, 25], causal=torch.tensor([True, False, True]))
    )
    decode, prefill = built.decode_metadata, built.prefill_metadata
    assert (
        decode.num_decodes,
        decode.num_prefills,
        decode.num_actual_tokens,
        decode.max_query_len,
    ) == (2, 0, 3, 8)
    assert (
        decode.query_start_loc.tolist() == [0, 1, 3]
        and decode.seq_lens.tolist() == [9, 2]
        and decode.causal.tolist() == [True, False]
    )
    assert (prefill.num_decodes, prefill.num_prefills, prefill.num_actual_tokens) == (0, 1, 20)
    assert prefill.query_start_loc.tolist() == prefill.query_start_loc_cpu.tolist() == [
        0,
        20,
    ] and prefill.seq_lens.tolist() == [25]
    assert torch.equal(torch.cat([decode.slot_mapping, prefill.slot_mapping]), built.slot_mapping)
    assert built.decode_metadata is decode, "every layer of the step gets the same part"


def test_decodes_of_a_mixed_batch_may_be_bounded_by_the_longest_one() -> None:
    """For builders of batches that are not replayed with other lengths."""
    mixed = _batch([1, 3, 20], [9, 4, 25])
    assert paged_fields(mixed, SPEC, 8)["max_decode_query_len"] == 8
    assert paged_fields(mixed, SPEC, 8, this_batch_only=True)["max_decode_query_len"] == 3
    bounded = _batch([1, 1], [9, 2], max_query_len=4)
    assert paged_fields(bounded, SPEC, 8, this_batch_only=True)["max_decode_query_len"] == 4, (
        "a batch of decodes keeps its bound"
    )


def test_a_uniform_batch_is_its_own_part() -> None:
    decodes = TorchMetadataBuilder(SPEC, "cpu").build(0, _batch([1, 1], [9, 2]))
    assert decodes.decode_metadata is decodes and decodes.prefill_metadata is None
    prefills = TorchMetadataBuilder(SPEC, "cpu").build(0, _batch([20], [20]))
    assert prefills.prefill_metadata is prefills and prefills.decode_metadata is None


def test_a_paged_layer_needs_a_table() -> None:
    with pytest.raises(ContractError, match="reads the cache through a block table"):
        TorchMetadataBuilder(SPEC, "cpu").build(
            0, CommonAttentionMetadata.from_lengths([1], [1], device="cpu")
        )


def _strided(common: CommonAttentionMetadata, name: str) -> CommonAttentionMetadata:
    tensor = getattr(common, name)
    return common.replace(**{name: torch.stack([tensor, tensor + 7], -1)[..., 0]})


@pytest.mark.parametrize(
    "name", ["query_start_loc", "seq_lens", "slot_mapping", "block_table_tensor"]
)
def test_strided_metadata_is_made_contiguous(name: str) -> None:
    """D1: by every backend; only a captured step cannot follow the copy and is refused."""
    common = _batch([1, 2, 20], [9, 2, 25])
    builder, strided = TorchMetadataBuilder(SPEC, "cpu"), _strided(common, name)
    assert not getattr(strided, name).is_contiguous()
    built, expected = builder.build(0, strided), builder.build(0, common)
    field = name.removesuffix("_tensor")
    assert torch.equal(getattr(built, field), getattr(expected, field))
    assert getattr(built, field).is_contiguous()
    with pytest.raises(ContractError, match=f"{field} has strides .*captured step"):
        builder.build_for_cudagraph_capture(strided)
