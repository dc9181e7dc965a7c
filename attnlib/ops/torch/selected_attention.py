"""Attention over selected keys of the paged cache (M11).

The keys of a list are gathered in the order of their positions, so that the order of the list and
its padding change no bit. Keys that are not selected are not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.batch import clear_tail, list_requests, on_host
from attnlib.ops.torch.mask import key_range
from attnlib.ops.torch.selected_part import SelectedPart
from attnlib.sparse.key_selection import KeySelection, SelectedKeys

__all__ = ["selected_attention", "selects_everything"]


@torch.no_grad()
@without_autocast
def selected_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    selection: KeySelection,
    selected: SelectedKeys,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    kernels: str = "auto",
) -> None:
    """Write the attention of every query token over its selected visible keys to `out`.

    Args:
        query, key_cache, value_cache, block_table: as in `paged_prefill`.
        query_start_loc, seq_lens, params, out, lse: likewise.
        query_start_loc_cpu, seq_lens_cpu: likewise.
        selection: the form of the lists.
        selected: the lists; checked by the caller (`SelectedKeys.check`).
        kernels: ignored; see `attnlib.ops.triton.selected_attention`.
    """
    starts, lengths = on_host(query_start_loc, query_start_loc_cpu), on_host(seq_lens, seq_lens_cpu)
    first_lists = starts if selected.list_start_loc is None else selected.list_start_loc.cpu()
    for request in list_requests(starts, lengths, params.causal):
        part = SelectedPart(request, query, key_cache, value_cache, block_table, params, selection)
        first = int(first_lists[request.index])
        count = -(-request.query_len // selection.query_block_size)
        row_lse = None if lse is None else lse[request.rows]
        part.attend(selected.indices[first : first + count], out[request.rows], row_lse)
    clear_tail(out, lse, starts)


def selects_everything(
    selected: SelectedKeys,
    selection: KeySelection,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
) -> bool:
    """Whether every list selects every key that one of its queries sees. Reads values.

    Args:
        selected, selection: the lists and their form.
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32.
        params: the mask.
    """
    size = selection.query_block_size
    first_lists = query_start_loc if selected.list_start_loc is None else selected.list_start_loc
    for request in list_requests(query_start_loc, seq_lens, params.causal):
        first = int(first_lists[request.index])
        for begin in range(0, request.query_len, size):
            end = min(begin + size, request.query_len)
            low, high = key_range(
                request.first_position + begin,
                request.first_position + end - 1,
                request.seq_len,
                request.causal,
                params,
            )
            needed = range(low // selection.block_size, -(-high // selection.block_size))
            if high <= low:
                continue
            if len(needed) > selected.indices.shape[2]:
                return False
            lists = selected.indices[first + begin // size]
            wanted = torch.arange(needed.start, needed.stop, dtype=lists.dtype, device=lists.device)
            if not bool((lists[:, None, :] == wanted[:, None]).any(-1).all()):
                return False
    return True
