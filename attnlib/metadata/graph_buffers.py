"""The tensors of a batch at fixed addresses, which a CUDA graph reads (G3)."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.batch_slice import rows_of
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.score_functions.query_tensors import QUERY_ROW
from attnlib.spec import AttentionSpec, AttentionType, StateSpec
from attnlib.workspace import BatchLimits

__all__ = ["GraphBuffers", "block_size_of"]


class GraphBuffers:
    """Buffers for the largest batch.

    Args:
        builder: of the batches.
        limits: the largest batch.
        max_blocks: columns of the block table.
        score_columns: columns of the tensors of a score function; None for one per token.
    """

    def __init__(
        self,
        builder: AttentionMetadataBuilder[Any],
        limits: BatchLimits,
        max_blocks: int,
        score_columns: int | None,
    ) -> None:
        self._limits = limits
        spec: AttentionSpec | StateSpec = builder.spec
        self._block_size = block_size_of(spec)
        self._has_states = isinstance(spec, StateSpec)
        self._is_cross = (
            isinstance(spec, AttentionSpec) and spec.attn_type is AttentionType.ENCODER_DECODER
        )
        device, reqs, tokens = builder.device, limits.max_num_reqs, limits.max_num_tokens
        self._query_start_loc = torch.zeros(reqs + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(reqs, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(reqs, max_blocks, dtype=torch.int32, device=device)
        self._slot_mapping = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self.score_columns = score_columns or limits.max_seq_len
        # Without sources, each request reads the slot that it writes.
        self._state_slots = torch.full((reqs,), -1, dtype=torch.int32, device=device)
        self._state_sources = self._state_slots.clone()
        self.score_function = function = (
            spec.score_function if isinstance(spec, AttentionSpec) else None
        )
        self.score_tensors = {
            name: torch.zeros(
                reqs,
                1 if name == QUERY_ROW else self.score_columns,
                dtype=torch.int32,
                device=device,
            )
            for name in (() if function is None else function.batch_tensors)
        }

    def named(self) -> dict[str, torch.Tensor]:
        """The buffers by name."""
        return {
            "query_start_loc": self._query_start_loc,
            "seq_lens": self._seq_lens,
            "block_table": self._block_table,
            "slot_mapping": self._slot_mapping,
            "state_slots": self._state_slots,
            "state_sources": self._state_sources,
            **{f"score_{name}": tensor for name, tensor in self.score_tensors.items()},
        }

    def reset(self, reqs: int, query_len: int) -> None:
        """Requests that have only new tokens, and write none."""
        starts, lengths = _host_lengths(reqs, query_len)
        self._query_start_loc[: reqs + 1].copy_(starts, non_blocking=True)
        self._seq_lens[:reqs].copy_(lengths, non_blocking=True)
        for slots in (self._slot_mapping, self._state_slots, self._state_sources):
            slots.fill_(-1)

    def fill(self, common: CommonAttentionMetadata, padded_num_reqs: int, tokens: int) -> None:
        """Copy a batch, padded to a number of requests and of tokens. No host sync."""
        reqs = common.num_reqs
        self._query_start_loc[: reqs + 1].copy_(common.query_start_loc, non_blocking=True)
        self._query_start_loc[reqs + 1 : padded_num_reqs + 1].fill_(common.num_actual_tokens)
        self._seq_lens[:reqs].copy_(common.seq_lens, non_blocking=True)
        self._seq_lens[reqs:padded_num_reqs].fill_(0)
        if common.block_table_tensor is not None:
            table = common.block_table_tensor[:, : self._block_table.shape[1]]
            self._block_table[:reqs, : table.shape[1]].copy_(table, non_blocking=True)
        self._slot_mapping[:tokens].fill_(-1)
        if common.slot_mapping is not None:
            slots = common.slot_mapping[: common.num_actual_tokens]
            self._slot_mapping[: slots.shape[0]].copy_(slots, non_blocking=True)
        for persistent, given_slots in (
            (self._state_slots, common.state_slots),
            (self._state_sources, common.state_slots),
            (self._state_sources, common.state_sources),
        ):
            if given_slots is not None:
                persistent[:reqs].copy_(given_slots, non_blocking=True)
                persistent[reqs:padded_num_reqs].fill_(-1)
        for name, persistent in self.score_tensors.items():
            given = (common.score_tensors or {})[name]
            persistent[:reqs, : given.shape[1]].copy_(given, non_blocking=True)
            # A lookup past the last column gives the last one, also in the wider tensor.
            persistent[:reqs, given.shape[1] :].copy_(
                given[:, -1:].expand(-1, persistent.shape[1] - given.shape[1]), non_blocking=True
            )

    def batch(
        self, reqs: int, query_len: int, common: CommonAttentionMetadata | None
    ) -> CommonAttentionMetadata:
        """A batch of `reqs` rows over the buffers, with the upper bounds of the capture.

        Host copies have the same values as the tensors on the device; None where the batch has
        none.
        """
        starts, seq_lens = _host_lengths(reqs, query_len)
        extra: dict[str, Any] = {"is_cross_attention": self._is_cross}
        if common is not None:
            padding = reqs - common.num_reqs
            starts, seq_lens = common.query_start_loc_cpu, common.seq_lens_cpu
            if starts is not None:
                starts = torch.cat([starts, starts[-1:].expand(padding)])
            if seq_lens is not None:
                seq_lens = torch.cat([seq_lens, seq_lens.new_zeros(padding)])
            extra = {
                "causal": common.causal,
                "is_cross_attention": common.is_cross_attention,
                "shared_prefixes": common.shared_prefixes,
            }
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
            max_seq_len=self._limits.max_seq_len,
            block_table_tensor=self._block_table[:reqs],
            slot_mapping=None if self._is_cross else self._slot_mapping[: reqs * query_len],
            score_tensors=rows_of(self.score_tensors or None, slice(0, reqs)),
            state_slots=self._state_slots[:reqs] if self._has_states else None,
            state_sources=self._state_sources[:reqs] if self._has_states else None,
            block_size=self._block_size,
            **extra,
        )


def _host_lengths(reqs: int, query_len: int) -> tuple[Any, Any]:
    """Starts and lengths of requests that have `query_len` new tokens each, and no others."""
    starts = torch.arange(reqs + 1, dtype=torch.int32, device="cpu") * query_len
    return starts, torch.full((reqs,), query_len, dtype=torch.int32, device="cpu")


def block_size_of(spec: AttentionSpec | StateSpec) -> int:
    """Tokens per block of a layer's cache; 1 for state layers, which have no blocks."""
    return 1 if isinstance(spec, StateSpec) else spec.block_size
