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
from attnlib.metadata.batch_slice import rows_of
from attnlib.metadata.checks import check_block_size
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionType, CudaGraphSupport
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
        if builder.limits is None:
            raise ContractError(
                f"{type(builder).__name__} has no limits, so it may free a workspace whose address "
                "a captured graph holds: pass limits=BatchLimits(...) to make_builder"
            )
        self.builder = builder
        self.limits = limits
        self.cross_attention = cross_attention
        self._is_cross = builder.spec.attn_type is AttentionType.ENCODER_DECODER
        self.max_blocks = max_blocks or -(-limits.max_seq_len // builder.spec.block_size)
        device, reqs, tokens = builder.device, limits.max_num_reqs, limits.max_num_tokens
        self._query_start_loc = torch.zeros(reqs + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(reqs, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(reqs, self.max_blocks, dtype=torch.int32, device=device)
        self._slot_mapping = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self.score_columns = score_columns or limits.max_seq_len
        function = builder.spec.score_function
        self._score_tensors = {
            name: torch.zeros(reqs, self.score_columns, dtype=torch.int32, device=device)
            for name in (() if function is None else function.batch_tensors)
        }

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
        common, tokens = common_attn_metadata, padded_num_reqs * query_len
        self._check_fits(common, padded_num_reqs, query_len)
        reqs = common.num_reqs
        self._query_start_loc[: reqs + 1].copy_(common.query_start_loc, non_blocking=True)
        self._query_start_loc[reqs + 1 : padded_num_reqs + 1].fill_(common.num_actual_tokens)
        self._seq_lens[:reqs].copy_(common.seq_lens, non_blocking=True)
        self._seq_lens[reqs:padded_num_reqs].fill_(0)
        if common.block_table_tensor is not None:
            width = common.block_table_tensor.shape[1]
            self._block_table[:reqs, :width].copy_(common.block_table_tensor, non_blocking=True)
        self._slot_mapping[:tokens].fill_(-1)
        if common.slot_mapping is not None:
            self._slot_mapping[: common.num_actual_tokens].copy_(
                common.slot_mapping[: common.num_actual_tokens], non_blocking=True
            )
        for name, persistent in self._score_tensors.items():
            given = (common.score_tensors or {})[name]
            persistent[:reqs, : given.shape[1]].copy_(given, non_blocking=True)
            # A lookup past the last column gives the last one, also in the wider tensor.
            persistent[:reqs, given.shape[1] :].copy_(
                given[:, -1:].expand(-1, self.score_columns - given.shape[1]), non_blocking=True
            )
        return self._padded(padded_num_reqs, query_len, common)

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
        cross = self._required_cross() if is_encoder_decoder_model else None
        more = (
            {}
            if cross is None
            else {
                "encoder_seq_lens": cross._seq_lens,
                "cross_block_table": cross._block_table,
                "cross_slot_mapping": cross._slot_mapping,
            }
        )
        return {
            **more,
            "query_start_loc": self._query_start_loc,
            "seq_lens": self._seq_lens,
            "block_table": self._block_table,
            "slot_mapping": self._slot_mapping,
            **{f"score_{name}": tensor for name, tensor in self._score_tensors.items()},
        }

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
        starts = torch.arange(batch_size + 1, dtype=torch.int32) * query_len
        lengths = torch.full((batch_size,), query_len, dtype=torch.int32)
        self._check_size(batch_size, query_len)
        self._query_start_loc[: batch_size + 1].copy_(starts, non_blocking=True)
        self._seq_lens[:batch_size].copy_(lengths, non_blocking=True)
        self._slot_mapping.fill_(-1)
        captured = self._padded(batch_size, query_len, None)
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
        per_request = -(-self.limits.max_num_tokens // self.limits.max_num_reqs)
        limits = BatchLimits(
            max_num_reqs=batch_size,
            max_num_tokens=batch_size * per_request,
            max_seq_len=self.limits.max_seq_len,
        )
        builder = type(self.builder)(
            self.builder.spec,
            self.builder.device,
            layer_names=self.builder.layer_names,
            layers=self.builder.layers,
            config=self.builder.config,
            limits=limits,
        )
        cross = self.cross_attention
        return type(self)(
            builder, limits, max_blocks=self.max_blocks, score_columns=self.score_columns,
            cross_attention=None if cross is None else cross.graph_clone(batch_size),
        )  # fmt: skip

    def _padded(
        self, reqs: int, query_len: int, common: CommonAttentionMetadata | None
    ) -> CommonAttentionMetadata:
        """A batch of `reqs` rows over the buffers, with the upper bounds of the capture.

        Host copies have the same values as the tensors on the device; None where the batch has
        none.
        """
        starts: torch.Tensor | None = torch.arange(reqs + 1, dtype=torch.int32) * query_len
        seq_lens: torch.Tensor | None = torch.full((reqs,), query_len, dtype=torch.int32)
        extra: dict[str, Any] = {"is_cross_attention": self._is_cross}
        if common is not None:
            padding = reqs - common.num_reqs
            starts, seq_lens = common.query_start_loc_cpu, common.seq_lens_cpu
            if starts is not None:
                starts = torch.cat([starts, starts[-1:].expand(padding)])
            if seq_lens is not None:
                seq_lens = torch.cat([seq_lens, torch.zeros(padding, dtype=torch.int32)])
            extra = {
                "causal": common.causal, "is_cross_attention": common.is_cross_attention,
                "shared_prefixes": common.shared_prefixes,
            }  # fmt: skip
        computed = None
        if starts is not None and seq_lens is not None:
            computed = seq_lens - (starts[1:] - starts[:-1])
        return CommonAttentionMetadata(
            query_start_loc=self._query_start_loc[: reqs + 1],
            query_start_loc_cpu=starts,
            seq_lens=self._seq_lens[:reqs],
            seq_lens_cpu=seq_lens,
            num_computed_tokens_cpu=computed,
            num_reqs=reqs,
            num_actual_tokens=reqs * query_len,
            max_query_len=query_len,
            max_seq_len=self.limits.max_seq_len,
            block_table_tensor=self._block_table[:reqs],
            slot_mapping=None if self._is_cross else self._slot_mapping[: reqs * query_len],
            score_tensors=rows_of(self._score_tensors or None, slice(0, reqs)),
            block_size=self.builder.spec.block_size,
            **extra,
        )

    def _check_fits(self, common: CommonAttentionMetadata, reqs: int, query_len: int) -> None:
        self._check_size(reqs, query_len)
        check_block_size(common, self.builder.spec)
        if common.num_reqs > reqs or common.max_query_len > query_len:
            raise ContractError(
                f"{common.num_reqs} requests of up to {common.max_query_len} tokens do not fit a "
                f"graph captured for {reqs} requests of {query_len}: capture a larger graph, or "
                "run this batch without a graph"
            )
        for name, value in (("causal", common.causal), ("query_bias", common.query_bias)):
            if isinstance(value, torch.Tensor):
                raise ContractError(
                    f"{name} is a tensor of this batch, and a captured graph would keep reading "
                    "it: run such batches without a graph"
                )
        if common.is_cross_attention and common.slot_mapping is not None:
            raise ContractError(
                "a graph writes the keys of its own tokens only: write the keys of cross-attention "
                "in a step without a graph, then replay with slot_mapping=None"
            )
        for name in self._score_tensors:
            given = (common.score_tensors or {}).get(name)
            if given is None or given.shape[1] > self.score_columns:
                found = "missing" if given is None else f"{given.shape[1]} columns wide"
                raise ContractError(
                    f"the batch tensor {name!r} of the score function is {found}; the captured one "
                    f"has {self.score_columns} columns: pass score_columns to AttentionState",
                    rule="M10",
                )
        width = 0 if common.block_table_tensor is None else common.block_table_tensor.shape[1]
        if width > self.max_blocks:
            raise ContractError(
                f"block_table has {width} columns, the captured one has {self.max_blocks}: "
                "raise max_seq_len in the limits",
                rule="P3",
            )
        if common.max_seq_len > self.limits.max_seq_len:
            raise ContractError(
                f"max_seq_len={common.max_seq_len} exceeds the {self.limits.max_seq_len} that "
                "graphs are captured for: raise it in the limits"
            )

    def _check_size(self, reqs: int, query_len: int) -> None:
        if reqs > self.limits.max_num_reqs or reqs * query_len > self.limits.max_num_tokens:
            raise ContractError(
                f"{reqs} requests of {query_len} tokens exceed the limits of "
                f"{self.limits.max_num_reqs} requests and {self.limits.max_num_tokens} tokens: "
                "raise the limits"
            )
