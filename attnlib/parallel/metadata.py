"""The batches of divided layers (X3, X4)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlib.compile.objects import register_tensor_id
from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.parallel.addresses import table_of
from attnlib.parallel.divisions import Division
from attnlib.parallel.merge import MergeRows
from attnlib.parallel.staging import Staging, StagingPlan
from attnlib.spec import AttentionSpec

__all__ = ["GivenScales", "ParallelMetadata", "divided_batch", "facts_of"]

_SIZES = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len")


class GivenScales:
    """A batch whose layers compute no scales: each rank would have those of the keys that it
    stores (M9)."""

    @property
    def enable_kv_scales_calculation(self) -> bool:
        """False; other batches compute the scales of a quantized cache if it is True."""
        return False

    @enable_kv_scales_calculation.setter
    def enable_kv_scales_calculation(self, value: bool) -> None:
        if value:
            raise ContractError(
                "enable_kv_scales_calculation of a batch of divided layers: ranks would compute "
                "different scales; pass k_scale and v_scale, equal on all ranks, to "
                "PagedKVCache.allocate",
                rule="M9",
            )


@dataclass(eq=False)
class ParallelMetadata(GivenScales):
    """One batch on one rank.

    Attributes:
        made_for: spec and division of the layers that may use it.
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

    made_for: tuple[AttentionSpec, Division]
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

    @functools.cached_property
    def behind_queries(self) -> AttentionMetadata | None:
        """`cached` for calls between the two kernels of an exchange by memory."""
        return None if self.cached is None else self.cached.behind_queries()


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
        ContractError: lengths that contradict each other, or a table that holds no integers.
    """
    common = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, device=device)
    table = table_of(block_table).to(common.seq_lens.device)
    return common.replace(block_table_tensor=table)


def facts_of(common: CommonAttentionMetadata) -> dict[str, Any]:
    """What the host knows of a batch, for agreements: its sizes, bounds and lengths."""
    known: dict[str, Any] = {name: getattr(common, name) for name in _SIZES}
    for name in ("query_start_loc_cpu", "seq_lens_cpu"):
        lengths = getattr(common, name)
        known[name] = None if lengths is None else lengths.tolist()
    return known
