"""The batches of divided layers (X3, X4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlib.compile.objects import register_tensor_id
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.parallel.merge import MergeRows
from attnlib.parallel.staging import Staging, StagingPlan

__all__ = ["ParallelMetadata", "divided_batch"]


@dataclass(eq=False)
class ParallelMetadata:
    """One batch on one rank.

    Attributes:
        num_actual_tokens: T, equal on all ranks.
        cached: the queries of all ranks over this rank's keys; None if no request has context.
        over_context: whether the layer `context` computes that, instead of `cached`.
        empty: `LocalRows.empty`.
        new: the queries of this rank over the new tokens, where `cached` is the context only.
        staging: where these new tokens are.
        scratch: the memory for them.
        slot_mapping: `[T]` int64, slots of the new tokens on this rank; None writes nothing.
        merge_rows: of the exchange, without and with sinks.
        agreed: whether all ranks have agreed on a call.
    """

    num_actual_tokens: int
    cached: AttentionMetadata | None
    over_context: bool
    empty: Tensor | None
    new: AttentionMetadata | None
    staging: StagingPlan | None
    scratch: Staging
    slot_mapping: Tensor | None
    merge_rows: MergeRows
    agreed: bool = False

    def __post_init__(self) -> None:
        self.handle = register_tensor_id(self)  # for torch.compile


def divided_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Tensor | Sequence[Sequence[int]],
    device: torch.device | str | None = None,
) -> CommonAttentionMetadata:
    """A batch for `ParallelBuilder.build` from lists.

    Args:
        query_lens, seq_lens: as in `CommonAttentionMetadata.from_lengths`, of all ranks.
        block_table: the blocks of this rank's local indices, `[R, columns]`, or lists of any
            lengths.
        device: of the rank.

    Raises:
        ContractError: lengths that contradict each other.
    """
    common = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, device=device)
    if not isinstance(block_table, Tensor):
        width = max((len(row) for row in block_table), default=0)
        padded = [[*row, *[0] * (width - len(row))] for row in block_table]
        block_table = torch.tensor(padded, dtype=torch.int32).reshape(len(padded), width)
    table = block_table.to(common.seq_lens.device, torch.int32)
    return common.replace(block_table_tensor=table)
