"""Persistent state for CUDA graphs: a metadata builder and the tensors that captured graphs read.

A captured graph replays addresses, not values. Each batch is therefore copied into tensors whose
addresses never change: `graph_capture_get_metadata_for_batch` returns metadata over these tensors,
and `begin_forward` fills them before a replay.
"""

from __future__ import annotations

from typing import Any, Generic

import torch

from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadataBuilder, M
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.graph_buffers import GraphBuffers, block_size_of
from attnlib.metadata.host_lengths import check_type
from attnlib.metadata.query_rows import with_query_rows
from attnlib.metadata.state_checks import check_fits, check_size
from attnlib.ops.addresses import as_count
from attnlib.spec import CudaGraphSupport
from attnlib.workspace import BatchLimits

__all__ = ["AttentionState"]


class AttentionState(Generic[M]):
    """Persistent state of one backend for one model runner.

    Args:
        builder: the metadata builder of the backend, with limits. Without limits it may free a
            workspace whose address a captured graph holds.
        limits: the largest batch that is captured or replayed.
        max_blocks: columns of the persistent block table. None means the number of blocks that
            `limits.max_seq_len` tokens need.
        score_columns: columns of the persistent batch tensors of a score function (M10). None means
            `limits.max_seq_len`, one per position.
        cross_attention: the state of the cross-attention layers of an encoder-decoder model, with a
            builder and limits of their own (`limits.max_seq_len` bounds the encoder lengths). Its
            batches have `is_cross_attention` and no slots: keys of the encoder are written in a
            step without a graph.

    Attributes:
        builder: the builder for captures and replays of this state. A clone has its own.

    Raises:
        ContractError: the builder has no limits.
    """

    def __init__(
        self,
        builder: AttentionMetadataBuilder[M],
        limits: BatchLimits,
        *,
        max_blocks: int | None = None,
        score_columns: int | None = None,
        cross_attention: AttentionState[Any] | None = None,
    ) -> None:
        if not isinstance(builder, AttentionMetadataBuilder) or not isinstance(limits, BatchLimits):
            raise ContractError(
                f"builder is a {type(builder).__name__} and limits a {type(limits).__name__}: pass "
                "a builder of make_builder, and BatchLimits"
            )
        if builder.limits is None:
            raise ContractError(
                f"{type(builder).__name__} has no limits, so it may free a workspace whose address "
                "a captured graph holds: pass limits=BatchLimits(...) to make_builder"
            )
        self.builder = builder
        self.limits = limits
        self.cross_attention = cross_attention
        if max_blocks is None:
            max_blocks = -(-limits.max_seq_len // block_size_of(builder.spec))
        self.max_blocks = as_count("max_blocks", max_blocks)
        self.buffers = GraphBuffers(builder, limits, self.max_blocks, score_columns)
        self.score_columns = self.buffers.score_columns

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the batch tensors that the score function reads."""
        return tuple(self.buffers.score_tensors)

    def begin_forward(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        padded_num_reqs: int,
        query_len: int = 1,
    ) -> CommonAttentionMetadata:
        """Copy a batch into the persistent buffers, padded to a captured size. No host sync.

        Padding rows have query length 0, sequence length 0 and slot -1 (M7).

        Args:
            common_attn_metadata: the batch; at most `padded_num_reqs` requests of at most
                `query_len` new tokens.
            padded_num_reqs: the captured batch size.
            query_len: new tokens per request at capture.

        Returns:
            The padded batch over the persistent buffers.

        Raises:
            ContractError: the batch exceeds the captured size or the limits, or `causal` or
                `query_bias` is a tensor.
        """
        check_type(common_attn_metadata)
        common = common_attn_metadata.normalized()
        padded_num_reqs = as_count("padded_num_reqs", padded_num_reqs)
        query_len = as_count("query_len", query_len)
        tokens = padded_num_reqs * query_len
        common = with_query_rows(common, self.buffers.score_function)
        check_fits(self, common, padded_num_reqs, query_len)
        self.buffers.fill(common, padded_num_reqs, tokens)
        return self.buffers.batch(padded_num_reqs, query_len, common)

    def get_graph_input_buffers(
        self, attn_metadata: M | None = None, is_encoder_decoder_model: bool = False
    ) -> dict[str, torch.Tensor]:
        """The persistent buffers that a captured graph reads, by name.

        Their addresses do not change during the lifetime of the state (G3).

        Args:
            attn_metadata: not read; kept for vLLM's argument list.
            is_encoder_decoder_model: also return the buffers of the cross-attention layers:
                `encoder_seq_lens`, `cross_block_table` and `cross_slot_mapping`.

        Raises:
            ContractError: `is_encoder_decoder_model`, but the state has no `cross_attention`.
        """
        found = self.buffers.named()
        if is_encoder_decoder_model:
            of_cross = self._required_cross().buffers.named()
            found["encoder_seq_lens"] = of_cross["seq_lens"]
            found["cross_block_table"] = of_cross["block_table"]
            found["cross_slot_mapping"] = of_cross["slot_mapping"]
        return found

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, is_encoder_decoder_model: bool = False, *, query_len: int = 1
    ) -> M:
        """Metadata over the persistent buffers to capture a graph with.

        Every request has only its new tokens. The upper bounds come from the limits, so that the
        captured grids fit every later batch.

        Args:
            batch_size: requests in the graph.
            is_encoder_decoder_model: also capture the cross-attention layers; their metadata is
                `cross_attention` of the result.
            query_len: new tokens per request.

        Raises:
            ContractError: the backend supports no graphs, the batch exceeds the limits, or the
                state has no `cross_attention`.
        """
        if self.builder.cudagraph_support is CudaGraphSupport.NEVER:
            raise ContractError(
                f"{type(self.builder).__name__} has cudagraph_support=NEVER: its backend reads "
                "lengths on the host, which a graph would not read again; run steps without a "
                "graph, or choose a backend whose capabilities declare cudagraph"
            )
        check_size(self.limits, batch_size, query_len)
        self.buffers.reset(batch_size, query_len)
        captured = self.buffers.batch(batch_size, query_len, None)
        metadata = self.builder.build_for_cudagraph_capture(captured)
        if is_encoder_decoder_model:
            cross = self._required_cross()
            metadata.cross_attention = cross.graph_capture_get_metadata_for_batch(
                batch_size, query_len=query_len
            )
        return metadata

    def _required_cross(self) -> AttentionState[Any]:
        if self.cross_attention is None:
            raise ContractError(
                "is_encoder_decoder_model=True, but this state has no buffers for cross-attention: "
                "pass cross_attention=AttentionState(cross_builder, limits)"
            )
        return self.cross_attention

    def graph_clone(self, batch_size: int) -> AttentionState[M]:
        """A state for a second graph that may run at the same time as graphs of this state.

        The clone has its own persistent buffers and its own builder, with its own workspace and
        counters. Build its batches with `clone.builder`.

        Args:
            batch_size: requests in the largest batch of the clone.
        """
        batch_size = as_count("batch_size", batch_size)
        per_request = -(-self.limits.max_num_tokens // self.limits.max_num_reqs)
        limits = BatchLimits(
            max_num_reqs=batch_size,
            max_num_tokens=batch_size * per_request,
            max_seq_len=self.limits.max_seq_len,
        )
        builder = type(self.builder).create(
            self.builder.spec,
            self.builder.device,
            layer_names=self.builder.layer_names,
            layers=self.builder.layers,
            config=self.builder.config,
            limits=limits,
            **self.builder.clone_settings,
        )
        cross = self.cross_attention
        return type(self)(
            builder,
            limits,
            max_blocks=self.max_blocks,
            score_columns=self.score_columns,
            cross_attention=None if cross is None else cross.graph_clone(batch_size),
        )
