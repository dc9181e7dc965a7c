"""The batch of a captured `run`: lengths and block table in buffers of fixed addresses."""

from __future__ import annotations

import torch

from attnlib.compat.flashinfer.page import page_table
from attnlib.compat.flashinfer.page_lists import PageLists
from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata

__all__ = ["GraphBatch"]


class GraphBatch:
    """Buffers that `plan` between replays fills.

    Args:
        requests: of every plan.
        most_pages: pages of a request, at most.
        workspace: memory that holds the block table.
    """

    def __init__(self, requests: int, most_pages: int, workspace: torch.Tensor) -> None:
        scratch = workspace.view(torch.uint8)
        scratch = scratch[: scratch.numel() // 4 * 4].view(torch.int32)
        width = min(most_pages, scratch.numel() // max(requests, 1))
        integers = {"dtype": torch.int32, "device": workspace.device}
        self._starts = torch.empty(requests + 1, **integers)  # type: ignore[call-overload]
        self._lengths = torch.empty(requests, **integers)  # type: ignore[call-overload]
        self._table = scratch[: requests * width].view(requests, width)

    def fill(self, lists: PageLists, page_size: int) -> CommonAttentionMetadata:
        """The batch of a plan.

        Raises:
            ContractError: the plan has other requests than the first one, or more pages.
        """
        table = self._table
        if lists.num_reqs != table.shape[0] or lists.longest_row > table.shape[1]:
            raise ContractError(
                f"this plan has {lists.num_reqs} requests of up to {lists.longest_row} pages; the "
                f"first plan with use_cuda_graph=True fixed {table.shape[0]} requests of up to "
                f"{table.shape[1]} pages: give the wrapper larger buffers"
            )
        self._starts.copy_(lists.query_starts, non_blocking=True)
        self._lengths.copy_(lists.lengths, non_blocking=True)
        ends = lists.page_starts.to(table.device, non_blocking=True)
        pages = lists.pages.to(table.device, torch.int32, non_blocking=True)
        page_table(ends, pages, table.shape[1], out=table)
        return CommonAttentionMetadata(
            query_start_loc=self._starts,
            seq_lens=self._lengths,
            num_reqs=lists.num_reqs,
            num_actual_tokens=lists.num_tokens,
            max_query_len=lists.num_tokens,
            max_seq_len=table.shape[1] * page_size,
            block_table_tensor=table,
        )
