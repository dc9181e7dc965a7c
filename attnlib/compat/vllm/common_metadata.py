"""vLLM's batch metadata: ten fields that are the caller's tensors, in any form that vLLM takes."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.metadata.common import CommonAttentionMetadata as Common

__all__ = ["CommonAttentionMetadata"]


class CommonAttentionMetadata(Common):
    """`attnlib.CommonAttentionMetadata` with vLLM's constructor.

    Its fields are the tensors that were given. They may have any integer dtype and may be longer
    than the batch (persistent buffers). Builders of attnlib read `normalized()`. Slots at or past
    `num_actual_tokens` become -1, in the caller's tensor.

    Args:
        max_seq_len: upper bound of the sequence lengths; None takes the largest of `seq_lens_cpu`.
        more: further fields of `attnlib.CommonAttentionMetadata`.

    The other arguments are fields of that class.
    """

    def __init__(
        self,
        query_start_loc: torch.Tensor,
        query_start_loc_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        num_computed_tokens_cpu: torch.Tensor,
        num_reqs: int,
        num_actual_tokens: int,
        max_query_len: int,
        block_table_tensor: torch.Tensor | None,
        slot_mapping: torch.Tensor | None,
        *,
        max_seq_len: int | None = None,
        **more: Any,
    ) -> None:
        if max_seq_len is None:
            max_seq_len = int(seq_lens_cpu[:num_reqs].max()) if num_reqs else 0
        super().__init__(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc_cpu,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            num_computed_tokens_cpu=num_computed_tokens_cpu,
            num_reqs=num_reqs,
            num_actual_tokens=num_actual_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            block_table_tensor=block_table_tensor,
            slot_mapping=slot_mapping,
            **more,
        )

    def __post_init__(self) -> None:
        if self.slot_mapping is not None and not self.is_cross_attention:
            self.slot_mapping[self.num_actual_tokens :].fill_(-1)

    def normalized(self) -> Common:
        """The batch as attnlib's class: int32 lengths, int64 slots, no rows past the batch. Tensors
        in this form are shared or views, others are copies.

        Raises:
            ContractError: as `attnlib.CommonAttentionMetadata`.
        """
        reqs, slots = self.num_reqs, self.slot_mapping
        if slots is not None and not self.is_cross_attention:
            slots = slots[: self.num_actual_tokens]
        return Common(
            query_start_loc=self.query_start_loc[: reqs + 1].int(),
            query_start_loc_cpu=_rows(self.query_start_loc_cpu, reqs + 1),
            seq_lens=self.seq_lens[:reqs].int(),
            seq_lens_cpu=_rows(self.seq_lens_cpu, reqs),
            num_computed_tokens_cpu=_rows(self.num_computed_tokens_cpu, reqs),
            num_reqs=reqs,
            num_actual_tokens=self.num_actual_tokens,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            block_table_tensor=_rows(self.block_table_tensor, reqs),
            slot_mapping=None if slots is None else slots.long(),
            causal=self.causal,
            query_bias=self.query_bias,
            score_tensors=self.score_tensors,
            is_cross_attention=self.is_cross_attention,
            shared_prefixes=self.shared_prefixes,
            block_size=self.block_size,
        )


def _rows(tensor: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """The first rows as int32; None for None."""
    return None if tensor is None else tensor[:count].int()
