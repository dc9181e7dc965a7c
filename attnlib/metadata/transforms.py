"""Chunked attention as causal attention over more and shorter requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlib.errors import AssertedContractError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["make_local_attention_virtual_batches"]


def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    query_start_loc_np: np.ndarray,
    seq_lens_np: np.ndarray,
    block_table: torch.Tensor,
    block_size: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
    """Create one virtual request for each chunk that contains new tokens of a request.

    Causal attention of a virtual request is chunked attention of its tokens. A request with
    context c and length s has new tokens in the chunks c // chunk to (s - 1) // chunk. Virtual
    requests keep the order of the tokens, so the packed query tensor is used unchanged. A request
    without new tokens has no virtual requests.

    Args:
        attn_chunk_size: positions in one chunk; a multiple of `block_size`.
        query_start_loc_np: `[R+1]` int32, offsets of the requests in the packed tokens.
        seq_lens_np: `[R]` int32, context plus new tokens.
        block_table: `[R, max_blocks]` int32, any device.
        block_size: tokens in one block. The default, as in vLLM, is refused.

    Returns:
        (query lengths `[V]`, query offsets `[V+1]`, sequence lengths `[V]`, block table `[V,
        attn_chunk_size / block_size]`) of V virtual requests. Table entries past the last block of
        a virtual request repeat a block of the request and are never read (P3).

    Raises:
        AssertedContractError: the chunk size is not a multiple of the block size.
    """
    import numpy as np  # the arrays of the caller are numpy arrays, as in vLLM

    if block_size < 1 or attn_chunk_size % block_size:
        raise AssertedContractError(
            f"attn_chunk_size={attn_chunk_size} is not a multiple of block_size={block_size}: a "
            f"virtual request must start at a block boundary"
        )
    query_lens = np.diff(query_start_loc_np)
    context = seq_lens_np - query_lens
    first = context // attn_chunk_size
    counts = np.where(query_lens > 0, (seq_lens_np - 1) // attn_chunk_size - first + 1, 0)
    request = np.repeat(np.arange(len(seq_lens_np)), counts)
    chunk = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts) + first[request]
    key_start = chunk * attn_chunk_size
    key_end = np.minimum(seq_lens_np[request], key_start + attn_chunk_size)
    query_lens_local = (key_end - np.maximum(context[request], key_start)).astype(np.int32)
    starts_local = np.zeros(len(request) + 1, dtype=np.int32)
    np.cumsum(query_lens_local, out=starts_local[1:])
    columns = (key_start // block_size)[:, None] + np.arange(attn_chunk_size // block_size)
    columns = np.minimum(columns, max(block_table.shape[1] - 1, 0))
    rows_index = torch.from_numpy(np.repeat(request, columns.shape[1])).to(block_table.device)
    local_table = block_table[
        rows_index, torch.from_numpy(columns.reshape(-1)).to(block_table.device)
    ]
    return (
        query_lens_local,
        starts_local,
        (key_end - key_start).astype(np.int32),
        local_table.view(columns.shape),
    )
