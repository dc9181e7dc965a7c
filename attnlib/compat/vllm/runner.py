"""vLLM's v0 builder and state, which a model runner creates from itself.

The runner is any object with the attributes that `config.runner_spec` reads and

    attn_backend, device                       the backend class; where the batches run
    max_batchsize_to_capture                   requests of the largest CUDA graph
    max_seq_len_to_capture                     tokens of the longest sequence in a graph
    model_config.is_encoder_decoder            optional; adds the buffers of cross-attention
    model_config.max_encoder_len               optional; encoder tokens of the longest sequence
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

from attnlib.compat.vllm.config import runner_spec
from attnlib.errors import ContractError
from attnlib.metadata.batch_metadata import AttentionMetadata
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.state import AttentionState as State
from attnlib.spec import AttentionType
from attnlib.workspace import BatchLimits

__all__ = ["AttentionMetadataBuilder", "AttentionState"]

T = TypeVar("T")


class AttentionMetadataBuilder(Generic[T]):
    """Builds the metadata of a v0 input builder's batch.

    Args:
        input_builder: has `runner`, and `inter_data_list`, whose elements have `block_tables`
            (sequence id -> blocks).
    """

    def __init__(self, input_builder: Any) -> None:
        self.input_builder = input_builder
        self.runner = input_builder.runner
        self.builder = self.runner.attn_backend.make_builder(
            runner_spec(self.runner), self.runner.device
        )

    def prepare(self) -> None:
        """Does nothing; called before each batch."""

    def build(
        self,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        cuda_graph_pad_size: int = -1,
        batch_size: int = -1,
    ) -> Any:
        """The metadata of the batch.

        Args:
            seq_lens: context and new tokens of each sequence.
            query_lens: new tokens of each sequence.
            cuda_graph_pad_size: not read: `AttentionState` pads the batches of graphs.
            batch_size: likewise.
        """
        tables = [
            blocks
            for data in self.input_builder.inter_data_list
            for blocks in data.block_tables.values()
        ]
        common = CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, tables, self.builder.spec.block_size, self.runner.device
        )
        return self.builder.build(common_prefix_len=0, common_attn_metadata=common)


class AttentionState(Generic[T]):
    """CUDA graph buffers of a v0 model runner.

    Args:
        runner: see the module's description.

    Attributes:
        state: the `attnlib.AttentionState` that holds the buffers.

    Raises:
        ContractError: the runner lacks an attribute.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        size, longest = runner.max_batchsize_to_capture, runner.max_seq_len_to_capture
        limits = BatchLimits(max_num_reqs=size, max_num_tokens=size, max_seq_len=longest)
        cross = None
        if getattr(runner.model_config, "is_encoder_decoder", False):
            encoder = getattr(runner.model_config, "max_encoder_len", longest)
            cross_limits = BatchLimits(max_num_reqs=size, max_num_tokens=size, max_seq_len=encoder)
            cross = self._state(AttentionType.ENCODER_DECODER, cross_limits)
        self.state = self._state(AttentionType.DECODER, limits, cross_attention=cross)

    def begin_forward(self, model_input: Any) -> None:
        """Copy a decode batch into the buffers, before a graph is replayed.

        Metadata of a batch that no graph of the runner holds stay as they are: one with prefills,
        or with more or longer sequences than the runner captures.

        Args:
            model_input: `attn_metadata` is the batch: metadata from a builder, or a
                `CommonAttentionMetadata`. It is replaced by the metadata over the buffers.
                `cross_attn_metadata`, if it has one, is the batch of the cross-attention layers.
                `batch_size`, if it has one, is the size of the graph; otherwise the batch is not
                padded.

        Raises:
            ContractError: the batch does not fit a graph of `batch_size` requests, is a
                `CommonAttentionMetadata` that fits no graph, or is neither.
        """
        given = model_input.attn_metadata
        common, size = _batch_of(given), getattr(model_input, "batch_size", None)
        is_built = not isinstance(given, CommonAttentionMetadata)
        if size is None and is_built and not self._holds(common):
            return
        size = size or common.num_reqs
        metadata = _build(self.state, self.state.begin_forward(common, size))
        cross = getattr(model_input, "cross_attn_metadata", None)
        if cross is not None and self.state.cross_attention is not None:
            own = self.state.cross_attention
            metadata.cross_attention = _build(own, own.begin_forward(_batch_of(cross), size))
        model_input.attn_metadata = metadata

    def _holds(self, common: CommonAttentionMetadata) -> bool:
        limits = self.state.limits
        return (
            common.max_query_len <= 1
            and common.num_reqs <= limits.max_num_reqs
            and common.max_seq_len <= limits.max_seq_len
        )

    def get_graph_input_buffers(
        self, attn_metadata: object, is_encoder_decoder_model: bool = False
    ) -> dict[str, torch.Tensor]:
        """The buffers that a captured graph reads, under vLLM's names.

        Args:
            attn_metadata: not read.
            is_encoder_decoder_model: also the buffers of cross-attention.

        Returns:
            `slot_mapping`, `seq_lens_tensor`, `block_tables`, `query_start_loc`, and for an
            encoder-decoder model `encoder_seq_lens_tensor`, `cross_slot_mapping`,
            `cross_block_tables`.
        """
        buffers = self.state.get_graph_input_buffers(attn_metadata, is_encoder_decoder_model)
        names = {
            "seq_lens": "seq_lens_tensor",
            "block_table": "block_tables",
            "encoder_seq_lens": "encoder_seq_lens_tensor",
            "cross_block_table": "cross_block_tables",
        }
        return {names.get(name, name): tensor for name, tensor in buffers.items()}

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, is_encoder_decoder_model: bool = False
    ) -> Any:
        """Metadata to capture a graph of `batch_size` decodes with.

        Args:
            batch_size: requests in the graph.
            is_encoder_decoder_model: also capture cross-attention; its metadata is
                `cross_attention` of the result.
        """
        return self.state.graph_capture_get_metadata_for_batch(batch_size, is_encoder_decoder_model)

    def graph_clone(self, batch_size: int) -> AttentionState[T]:
        """A state with buffers of its own, for a graph that runs at the same time."""
        clone = object.__new__(type(self))
        clone.runner, clone.state = self.runner, self.state.graph_clone(batch_size)
        return clone

    def _state(self, attn_type: AttentionType, limits: BatchLimits, **more: Any) -> State[Any]:
        spec = runner_spec(self.runner, attn_type)
        builder = self.runner.attn_backend.make_builder(spec, self.runner.device, limits=limits)
        state: State[Any] = self.runner.attn_backend.get_state_cls()(builder, limits, **more)
        return state


def _build(state: State[Any], common: CommonAttentionMetadata) -> Any:
    return state.builder.build(common_prefix_len=0, common_attn_metadata=common)


def _batch_of(given: object) -> CommonAttentionMetadata:
    """The batch that metadata of attnlib was built from.

    Raises:
        ContractError: an object of another kind.
    """
    if isinstance(given, CommonAttentionMetadata):
        return given.normalized()
    facts = given.facts if isinstance(given, AttentionMetadata) else None
    if facts is None or facts.query_start_loc is None or facts.seq_lens is None:
        raise ContractError(
            f"model_input.attn_metadata is a {type(given).__name__}; it must be what a builder of "
            "attnlib builds, or a CommonAttentionMetadata, from which the state builds the "
            "metadata of the graph"
        )
    return CommonAttentionMetadata(
        query_start_loc=facts.query_start_loc,
        query_start_loc_cpu=facts.query_start_loc_cpu,
        seq_lens=facts.seq_lens,
        seq_lens_cpu=facts.seq_lens_cpu,
        num_reqs=facts.seq_lens.shape[0],
        num_actual_tokens=facts.num_actual_tokens or 0,
        max_query_len=facts.max_query_len or 0,
        max_seq_len=facts.max_seq_len or 0,
        block_table_tensor=facts.block_table,
        slot_mapping=facts.slot_mapping,
        causal=None if facts.causal_from_spec else facts.causal,
        query_bias=facts.query_bias,
        score_tensors=facts.score_tensors,
        is_cross_attention=facts.is_cross_attention,
    )
