"""Strides of the metadata of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlib.errors import ContractError

if TYPE_CHECKING:
    from attnlib.metadata.common import CommonAttentionMetadata

__all__ = ["refuse_strided"]


def refuse_strided(common: CommonAttentionMetadata) -> None:
    """Check a batch that is captured in a CUDA graph: its kernels read contiguous metadata.

    Other batches are made contiguous when they are built. A replay would not repeat that copy.

    Raises:
        ContractError: metadata with other strides; the message names the tensor.
    """
    table = common.block_table_tensor
    rows = None if table is None else table[:1]  # rows may be apart, entries of a row may not
    for name, tensor in (
        ("query_start_loc", common.query_start_loc),
        ("seq_lens", common.seq_lens),
        ("slot_mapping", common.slot_mapping),
        ("block_table", rows),
        ("state_slots", common.state_slots),
        ("state_sources", common.state_sources),
    ):
        if tensor is not None and not tensor.is_contiguous():
            raise ContractError(
                f"{name} has strides {tensor.stride()}; a captured step needs it contiguous, "
                "because a copy would not follow later changes: call .contiguous() on a persistent "
                "buffer"
            )
