"""Builders, the parts of a batch, per-layer parameters and persistent state."""

from types import SimpleNamespace

import pytest
import torch

from attnlib.backends.torch.metadata import TorchMetadataBuilder
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import paged_fields
from attnlib.metadata.parameters import (
    PerLayerParameters,
    get_per_layer_parameters,
    group_layers,
    infer_global_hyperparameters,
)
from attnlib.metadata.state import AttentionState
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import BatchLimits, Workspace

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
    """For builders that know that the batch is not replayed with other lengths."""
    mixed = _batch([1, 3, 20], [9, 4, 25])
    assert paged_fields(mixed, SPEC, 8)["max_decode_query_len"] == 8
    assert paged_fields(mixed, SPEC, 8, this_batch_only=True)["max_decode_query_len"] == 3
    bounded = _batch([1, 1], [9, 2], max_query_len=4)
    assert paged_fields(bounded, SPEC, 8, this_batch_only=True)["max_decode_query_len"] == 4, (
        "a batch of decodes keeps the bound it came with"
    )


def test_a_uniform_batch_is_its_own_part() -> None:
    decodes = TorchMetadataBuilder(SPEC, "cpu").build(0, _batch([1, 1], [9, 2]))
    assert decodes.decode_metadata is decodes and decodes.prefill_metadata is None
    prefills = TorchMetadataBuilder(SPEC, "cpu").build(0, _batch([20], [20]))
    assert prefills.prefill_metadata is prefills and prefills.decode_metadata is None


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


def test_a_paged_layer_needs_a_table() -> None:
    with pytest.raises(ContractError, match="reads the cache through a block table"):
        TorchMetadataBuilder(SPEC, "cpu").build(
            0, CommonAttentionMetadata.from_lengths([1], [1], device="cpu")
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


def test_layers_that_differ_are_named() -> None:
    def layer(window: int | None, scale: float) -> SimpleNamespace:
        return SimpleNamespace(
            impl=SimpleNamespace(spec=SPEC.replace(sliding_window=window), scale=scale)
        )

    same = get_per_layer_parameters({"a": layer(None, 0.5), "b": layer(None, 0.5)})
    assert infer_global_hyperparameters(same) == PerLayerParameters(-1, None, 0.5, -1)
    mixed = get_per_layer_parameters(
        {"a": layer(None, 0.5), "b": layer(8, 0.5), "c": layer(None, 0.5)}
    )
    assert list(group_layers(mixed).values()) == [["a", "c"], ["b"]]
    with pytest.raises(
        UnsupportedConfigError,
        match=r"layers a \(.*window_left=-1.*\) and b \(.*window_left=7.*\) differ",
    ):
        infer_global_hyperparameters(mixed)
    with pytest.raises(UnsupportedConfigError, match="no attention layers"):
        infer_global_hyperparameters({})
    with pytest.raises(
        UnsupportedConfigError,
        match="layer a runs on SimpleNamespace, but this plan serves int only",
    ):
        get_per_layer_parameters({"a": layer(None, 0.5)}, int)


def test_state_pads_a_batch_into_buffers_that_stay() -> None:
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


def test_a_fixed_workspace_names_the_bytes() -> None:
    grown = Workspace(torch.device("cpu"))
    assert grown.reserve(100).numel() >= 100 and grown.num_bytes == 100
    with pytest.raises(ContractError, match="needs 101 bytes of workspace, 100 were declared"):
        Workspace(torch.device("cpu"), 100, fixed=True).reserve(101)
    with pytest.raises(ContractError, match="max_num_tokens=0 must be at least 1"):
        BatchLimits(max_num_reqs=1, max_num_tokens=0, max_seq_len=1)
