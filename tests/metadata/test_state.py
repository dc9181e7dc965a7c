"""Persistent state of a model runner (G3)."""

import sys

import pytest
import torch

from attnlib.backends.builtin import BUILTIN_BACKENDS
from attnlib.backends.loading import import_backend
from attnlib.backends.torch.metadata import TorchMetadataBuilder
from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.parameters import PerLayerParameters
from attnlib.metadata.state import AttentionState
from attnlib.metadata.states import StateMetadataBuilder
from attnlib.score_functions.builtin import documents
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, StateSpec
from attnlib.workspace import BatchLimits

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=4)
LIMITS = BatchLimits(max_num_reqs=4, max_num_tokens=8, max_seq_len=32)


def _batch(queries: list[int], sequences: list[int], **changes) -> CommonAttentionMetadata:
    table = [[8 * r + j for j in range(-(-s // 4))] for r, s in enumerate(sequences)]
    return CommonAttentionMetadata.from_lengths(queries, sequences, table, 4, "cpu", **changes)


class Capturable(TorchMetadataBuilder):
    """As if the torch backend supported graphs."""

    cudagraph_support = CudaGraphSupport.ALWAYS


def test_state_pads_a_batch_into_persistent_buffers() -> None:
    """M7, G3: padding rows are query_len 0, seq_len 0, slot -1, and addresses never change."""
    state = AttentionState(Capturable(SPEC, "cpu", limits=LIMITS), LIMITS)
    addresses = {
        name: buffer.data_ptr() for name, buffer in state.get_graph_input_buffers().items()
    }
    captured = state.graph_capture_get_metadata_for_batch(4)
    padded = state.begin_forward(_batch([1, 1], [9, 2]), 4)
    assert padded.query_start_loc.tolist() == padded.query_start_loc_cpu.tolist() == [0, 1, 2, 2, 2]
    assert padded.seq_lens.tolist() == padded.seq_lens_cpu.tolist() == [9, 2, 0, 0]
    assert padded.slot_mapping.tolist() == [8, 33, -1, -1] and padded.max_seq_len == 32
    assert padded.seq_lens.data_ptr() == captured.seq_lens.data_ptr()
    fewer = _batch([1, 1], [9, 2]).replace(slot_mapping=torch.tensor([8]))  # P4: writes one token
    assert state.begin_forward(fewer, 4).slot_mapping.tolist() == [8, -1, -1, -1]
    with pytest.raises(ContractError, match="requests=-1 must not be negative"):
        state.graph_capture_get_metadata_for_batch(-1)
    assert {
        name: buffer.data_ptr() for name, buffer in state.get_graph_input_buffers().items()
    } == addresses


def test_state_holds_the_batch_tensors_of_a_score_function() -> None:
    """M10, G3: at fixed addresses; columns behind those of the batch repeat its last one."""
    spec = SPEC.replace(score_function=documents())
    builder = Capturable(spec, "cpu", limits=LIMITS)
    state = AttentionState(builder, LIMITS, score_columns=4)
    captured = state.graph_capture_get_metadata_for_batch(4)
    begins = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)
    padded = state.begin_forward(
        _batch([1, 1], [9, 2], score_tensors={"document_begin": begins}), 4
    )
    found = builder.build(0, padded).score_tensors["document_begin"]
    assert found[:2].tolist() == [[0, 3, 3, 3], [1, 2, 2, 2]]
    assert found.data_ptr() == captured.score_tensors["document_begin"].data_ptr()
    with pytest.raises(ContractError, match="'document_begin' of the score function is missing"):
        state.begin_forward(_batch([1, 1], [9, 2]), 4)
    wide = {"document_begin": torch.zeros(2, 5, dtype=torch.int32)}
    with pytest.raises(ContractError, match="5 columns wide; the captured one has 4"):
        state.begin_forward(_batch([1, 1], [9, 2], score_tensors=wide), 4)


def test_state_requires_a_builder_with_limits() -> None:
    """Without limits a builder may free a workspace that a captured graph uses."""
    message = r"TorchMetadataBuilder has no limits.*limits=BatchLimits\(\.\.\.\) to make_builder"
    with pytest.raises(ContractError, match=message):
        AttentionState(TorchMetadataBuilder(SPEC, "cpu"), LIMITS)


def test_a_clone_has_its_own_buffers_and_builder() -> None:
    class Builder(TorchMetadataBuilder): ...

    layers = {"layers.0": PerLayerParameters(window_left=-1, logits_soft_cap=None, sm_scale=0.25)}
    builder = Builder(SPEC, "cpu", layers=layers, config={"key": 1}, limits=LIMITS)
    state = AttentionState(builder, LIMITS)
    clone = state.graph_clone(2)
    assert clone.limits == BatchLimits(max_num_reqs=2, max_num_tokens=4, max_seq_len=32)
    assert clone.max_blocks == state.max_blocks
    cloned = clone.get_graph_input_buffers()
    for name, buffer in state.get_graph_input_buffers().items():
        assert cloned[name].data_ptr() != buffer.data_ptr()
    other = clone.builder
    assert type(other) is Builder and other is not builder
    assert (other.spec, other.device, other.limits) == (SPEC, builder.device, clone.limits)
    assert (other.layer_names, other.layers, other.config) == (
        ("layers.0",),
        layers,
        {"key": 1},
    )


@pytest.mark.skipif(sys.platform != "linux", reason="Triton supports Linux only")
def test_a_clone_has_its_own_workspace() -> None:
    """Two graphs that run at the same time must not write partial results to one workspace."""
    from attnlib.backends.triton.metadata import TritonMetadataBuilder

    limits = BatchLimits(max_num_reqs=2, max_num_tokens=2, max_seq_len=4096)
    spec = SPEC.replace(head_size=16, block_size=16)
    state = AttentionState(TritonMetadataBuilder(spec, "cpu", limits=limits), limits)
    captured = state.graph_capture_get_metadata_for_batch(2)
    cloned = state.graph_clone(2).graph_capture_get_metadata_for_batch(2)
    assert captured.workspace is not None and cloned.workspace is not None
    assert captured.workspace.data_ptr() != cloned.workspace.data_ptr()
    assert captured.workspace.numel() == cloned.workspace.numel() > 0


@pytest.mark.parametrize("backend", sorted(set(BUILTIN_BACKENDS) - {"fla", "flashinfer_gdn"}))
def test_builders_declare_the_capability_of_their_backend(backend: str) -> None:
    """`full_cudagraph_supported` is true exactly for backends that can capture every batch."""
    cls = import_backend(BUILTIN_BACKENDS[backend].path)
    builder_cls = cls.get_builder_cls()
    level = cls.capabilities.cudagraph
    assert builder_cls.cudagraph_support is level
    assert builder_cls.full_cudagraph_supported is (level is CudaGraphSupport.ALWAYS)
    builder = object.__new__(builder_cls)  # the constructor may need a GPU or a kernel package
    assert builder.full_cudagraph_supported is (level is CudaGraphSupport.ALWAYS)


@pytest.mark.parametrize(
    ("queries", "sequences", "reqs", "message"),
    [
        ([1, 1, 1], [3, 3, 3], 2, "3 requests of up to 1 tokens do not fit a graph captured for 2"),
        ([2], [3], 2, "up to 2 tokens do not fit"),
        ([1], [60], 2, "max_seq_len=60 needs 15 columns of block_table, .* one has 8"),
        ([1], [3], 9, "9 requests of 1 tokens exceed the limits"),
    ],
)
def test_state_refuses_what_does_not_fit(
    queries: list[int], sequences: list[int], reqs: int, message: str
) -> None:
    state = AttentionState(TorchMetadataBuilder(SPEC, "cpu", limits=LIMITS), LIMITS)
    with pytest.raises(ContractError, match=message):
        state.begin_forward(_batch(queries, sequences), reqs)


def test_buffers_of_an_encoder_decoder_model() -> None:
    """G3: self-attention and cross-attention are captured over buffers whose addresses stay."""
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=64)
    fields = {"num_heads": 2, "head_size": 16, "dtype": torch.float32, "block_size": 16}
    states = []
    for kind in (AttentionType.DECODER, AttentionType.ENCODER_DECODER):
        spec = AttentionSpec(**fields, attn_type=kind)
        builder = Capturable(spec, "cpu", limits=limits)
        states.append(AttentionState(builder, limits))
    own = AttentionState(states[0].builder, limits, cross_attention=states[1])
    buffers = own.get_graph_input_buffers(None, True)
    assert set(buffers) - set(own.get_graph_input_buffers()) == {
        "encoder_seq_lens", "cross_block_table", "cross_slot_mapping",
    }  # fmt: skip
    captured = own.graph_capture_get_metadata_for_batch(4, True)
    assert captured.cross_attention.slot_mapping is None
    assert captured.cross_attention.seq_lens.data_ptr() == buffers["encoder_seq_lens"].data_ptr()
    encoder = CommonAttentionMetadata.from_lengths(
        [1, 1], [37, 5], [[1, 2, 3], [4]], 16, "cpu", is_cross_attention=True
    )
    padded = states[1].begin_forward(encoder, 4)
    assert buffers["encoder_seq_lens"].tolist() == [37, 5, 0, 0]
    assert buffers["cross_block_table"][0, :3].tolist() == [1, 2, 3]
    assert padded.is_cross_attention and padded.slot_mapping is None
    clone = own.graph_clone(2).get_graph_input_buffers(None, True)
    assert clone["encoder_seq_lens"].data_ptr() != buffers["encoder_seq_lens"].data_ptr()
    with pytest.raises(ContractError, match="this state has no buffers for cross-attention"):
        states[0].get_graph_input_buffers(None, True)
    with pytest.raises(ContractError, match="pass cross_attention=AttentionState"):
        states[0].graph_capture_get_metadata_for_batch(4, True)


def test_a_backend_without_graphs_refuses_a_capture() -> None:
    """Its batches may still use the persistent buffers."""
    state = AttentionState(TorchMetadataBuilder(SPEC, "cpu", limits=LIMITS), LIMITS)
    with pytest.raises(ContractError, match="TorchMetadataBuilder has cudagraph_support=NEVER"):
        state.graph_capture_get_metadata_for_batch(4)
    padded = state.begin_forward(_batch([1, 1], [9, 2]), 4)
    assert state.builder.build(0, padded).num_actual_tokens == 4


def test_buffers_refuse_batches_of_another_block_size() -> None:
    state = AttentionState(Capturable(SPEC.replace(block_size=8), "cpu", limits=LIMITS), LIMITS)
    with pytest.raises(ContractError, match="block_size=4, the layers have block_size=8"):
        state.begin_forward(_batch([1, 1], [9, 2]), 4)


def test_objects_of_other_types_are_refused() -> None:
    spec = AttentionSpec(num_heads=2, head_size=8, dtype=torch.float32)
    limits = BatchLimits(max_num_reqs=2, max_num_tokens=4, max_seq_len=64)
    builder = TorchMetadataBuilder(spec, "cpu", limits=limits)
    for given in ((None, limits), (builder, None), (spec, limits)):
        with pytest.raises(ContractError, match="builder is a .* and limits a .*: pass a builder"):
            AttentionState(*given)
    for blocks, message in ((-1, "must not be negative"), ("x", "is a str")):
        with pytest.raises(ContractError, match=f"max_blocks.*{message}"):
            AttentionState(builder, limits, max_blocks=blocks)
    state = AttentionState(builder, limits)
    batch = CommonAttentionMetadata.from_lengths([1], [1], [[0]], 16, "cpu")
    for given, message in (
        ((None, 2), "common_attn_metadata is a NoneType"),
        ((batch, None), "padded_num_reqs .*is a NoneType"),
        ((batch, 2, 1.5), "query_len .*is a float"),
    ):
        with pytest.raises(ContractError, match=message):
            state.begin_forward(*given)
    with pytest.raises(ContractError, match="batch_size .*is a NoneType"):
        state.graph_clone(None)


def test_a_table_may_be_wider_than_its_sequences() -> None:
    """P3: as those of a pool, whose blocks hold many pages of a layer."""
    state = AttentionState(TorchMetadataBuilder(SPEC, "cpu", limits=LIMITS), LIMITS)
    rows = [list(range(1, 16)), list(range(16, 31))]
    common = CommonAttentionMetadata.from_lengths([1, 1], [9, 32], rows, SPEC.block_size, "cpu")
    padded = state.begin_forward(common, 3)
    assert padded.block_table_tensor[:2].tolist() == [row[:8] for row in rows]


@pytest.mark.parametrize("name", ["block_table_tensor", "state_slots"])
def test_a_batch_must_have_what_a_graph_reads(name: str) -> None:
    """Else a replay would use that of the batch before."""
    builder: object = TorchMetadataBuilder(SPEC, "cpu", limits=LIMITS)
    if name == "state_slots":
        spec = StateSpec(num_heads=2, key_size=16, value_size=16, dtype=torch.float32)
        builder = StateMetadataBuilder(spec, "cpu", limits=LIMITS)
    state = AttentionState(builder, LIMITS)
    common = _batch([1, 1], [9, 32], state_slots=[0, 1])
    state.begin_forward(common, 3)
    with pytest.raises(ContractError, match=f"{name} is None"):
        state.begin_forward(common.replace(**{name: None}), 3)
