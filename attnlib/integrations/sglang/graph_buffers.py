"""Tensors with fixed addresses that captured CUDA graphs read."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.integrations.sglang.batch import block_table, captured_lengths
from attnlib.metadata.common import CommonAttentionMetadata

__all__ = ["GraphBuffers"]


class GraphBuffers:
    """The metadata of captured batches, in which all requests have equally many new tokens.

    Args:
        max_requests, max_tokens: of the largest captured batch.
        context_len: the longest sequence.
        page_size: tokens per page.
        device: of the model.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        context_len: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._context_len = context_len
        self._page_size = page_size
        self._recorded: set[tuple[int, int]] = set()  # requests, and new tokens of each
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._starts = torch.zeros(max_requests + 1, **integers)
        self._seq_lens = torch.zeros(max_requests, **integers)
        self._table = torch.zeros(max_requests, -(-context_len // page_size), **integers)
        self._slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)

    def fill(self, batch: Any, req_to_token: torch.Tensor) -> CommonAttentionMetadata:
        """Copy a batch to the buffers, before a capture or a replay.

        Args:
            batch: SGLang's, padded to the captured number of requests.
            req_to_token: SGLang's table of slots.

        Returns:
            The batch over the buffers, with bounds that hold for every batch of this size.
        """
        self._fill_table(batch, req_to_token)
        requests, new = self._fill_tokens(batch)
        tokens = new * requests
        return CommonAttentionMetadata(
            query_start_loc=self._starts[: requests + 1],
            query_start_loc_cpu=torch.arange(0, tokens + 1, new, dtype=torch.int32, device="cpu"),
            seq_lens=self._seq_lens[:requests],
            num_reqs=requests,
            num_actual_tokens=tokens,
            max_query_len=new,
            max_seq_len=self._context_len,
            block_table_tensor=self._table[:requests],
            slot_mapping=self._slots[:tokens],
        )

    def record(self, batch: Any) -> None:
        """Copy the lengths and slots of a captured batch, by operations that its graph records."""
        self._recorded.add(self._fill_tokens(batch))

    def fill_recorded(self, batch: Any, req_to_token: torch.Tensor) -> bool:
        """Copy what graphs do not record, before a replay: the pages, from a table that SGLang may
        change while a graph runs.

        Returns:
            Whether that is all: the graph of this size has recorded the rest.
        """
        return self._fill_table(batch, req_to_token) in self._recorded

    def _fill_table(self, batch: Any, req_to_token: torch.Tensor) -> tuple[int, int]:
        """Copy pages. Returns the requests, and the new tokens of each."""
        requests, new, _, longest = captured_lengths(batch, self._context_len)
        indices = batch.req_pool_indices[:requests]
        pages = block_table(req_to_token, indices, longest, self._page_size)
        self._table[:requests, : pages.shape[1]].copy_(pages)
        return requests, new

    def _fill_tokens(self, batch: Any) -> tuple[int, int]:
        """Copy lengths and slots. Returns the same as `_fill_table`."""
        requests, new, uncounted, _ = captured_lengths(batch, self._context_len)
        tokens = new * requests
        torch.arange(0, tokens + 1, new, out=self._starts[: requests + 1])
        self._seq_lens[:requests].copy_(batch.seq_lens[:requests])
        self._seq_lens[:requests].add_(uncounted)
        self._seq_lens[:requests].clamp_(min=new)  # padding rows have one token
        slots = batch.out_cache_loc[:tokens]  # SGLang leaves out those of padding rows
        self._slots[: len(slots)].copy_(slots)
        self._slots[len(slots) : tokens].fill_(-1)  # nothing is written
        return requests, new
