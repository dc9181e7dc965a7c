"""Choose the keys that queries attend to, by scores over a paged cache of index keys (M14)."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.torch.batch import Request, list_requests, on_host
from attnlib.sparse.key_selection import KeySelection

__all__ = ["select_keys"]

_MAX_SCORES = 1 << 24
"""Most scores that are held at a time: 64 MiB in float32, or those of one query token and all index
heads if these are more."""


@torch.no_grad()
@without_autocast
def select_keys(
    query: Tensor,
    weights: Tensor | None,
    key_cache: Tensor,
    key_scales: Tensor | None,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    selection: KeySelection,
    *,
    local_blocks: int = 0,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
) -> None:
    """Write the `max_blocks` blocks of keys with the largest scores of each query token to `out`.

    Args:
        query: `[T, Hi, Di]`, index queries, with their softmax scale if they have one.
        weights: `[T, Hi]` float32: the score of a key is the sum over the heads of
            weight * max(q . k, 0), and all heads share a list. None: each head has its own list by
            the scores q . k.
        key_cache: `[B, N, Di]`, index keys, any strides but the last.
        key_scales: `[B, N]` float32, the factor of each stored key; None without one.
        block_table: `[R, M]` int32 (P3).
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32.
        selection: the form of the lists. The score of a block is the largest score of its visible
            keys.
        local_blocks: blocks up to and including the query's own that are always selected.
        max_query_len: upper bound of the query lengths. Ignored: the lengths themselves are read.
        max_seq_len: upper bound of the sequence lengths. Ignored likewise.
        out: `[T, H, K]` int32, H = 1 or Hi: blocks in ascending order, then -1. Rows past the last
            request are -1.
        query_start_loc_cpu, seq_lens_cpu: host copies; without them the call synchronizes.
    """
    starts, lengths = on_host(query_start_loc, query_start_loc_cpu), on_host(seq_lens, seq_lens_cpu)
    out.fill_(-1)
    for request in list_requests(starts, lengths, True):
        if request.seq_len:
            keys = _keys_of(request, key_cache, key_scales, block_table)
            step = max(1, _MAX_SCORES // (query.shape[1] * request.seq_len))
            for begin in range(0, request.query_len, step):
                count = min(step, request.query_len - begin)
                rows = slice(request.start + begin, request.start + begin + count)
                positions = torch.arange(count, device=query.device)
                positions += request.first_position + begin
                own = None if weights is None else weights[rows]
                scores = _block_scores(query[rows], own, keys, positions, selection, local_blocks)
                _keep_best(scores, out[rows])


def _keys_of(
    request: Request, key_cache: Tensor, key_scales: Tensor | None, block_table: Tensor
) -> Tensor:
    """The index keys of a request, `[S, Di]` float32."""
    block_size = key_cache.shape[1]
    blocks = block_table[request.index, : -(-request.seq_len // block_size)].long()
    raw = key_cache.view(torch.uint8) if key_cache.element_size() == 1 else key_cache
    keys = raw[blocks].view(key_cache.dtype).float()
    if key_scales is not None:
        keys = keys * key_scales[blocks][..., None]
    return keys.flatten(0, 1)[: request.seq_len]


def _block_scores(
    query: Tensor,
    weights: Tensor | None,
    keys: Tensor,
    positions: Tensor,
    selection: KeySelection,
    local_blocks: int,
) -> Tensor:
    """Scores `[n, H, blocks]` float32: NaN counts as -inf, blocks without a visible key are NaN."""
    scores = torch.einsum("thd,sd->ths", query.float(), keys)
    if weights is not None:
        scores = torch.einsum("ths,th->ts", scores.clamp(min=0), weights.float()).unsqueeze(1)
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    places = torch.arange(keys.shape[0], device=keys.device)
    future = (places > positions[:, None])[:, None]
    size = selection.block_size
    padding = -keys.shape[0] % size
    scores = torch.nn.functional.pad(
        scores.masked_fill(future, -torch.inf), (0, padding), value=-torch.inf
    )
    scores = scores.view(*scores.shape[:-1], -1, size).amax(-1)
    blocks = torch.arange(scores.shape[-1], device=keys.device)
    own = positions.div(size, rounding_mode="floor")[:, None]
    local = (blocks > own - local_blocks) & (blocks <= own)
    scores = scores.masked_fill(local[:, None], torch.inf)
    return scores.masked_fill((blocks * size > positions[:, None])[:, None], torch.nan)


def _keep_best(scores: Tensor, out: Tensor) -> None:
    """Write the best blocks of each row; among equal scores those at the smallest positions."""
    hidden = scores.isnan()
    count = min(out.shape[2], scores.shape[2])
    # Two stable sorts: by descending score, then visible blocks before hidden ones.
    by_score = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True)
    places = by_score.indices
    order = hidden.gather(-1, places).int().sort(dim=-1, stable=True).indices
    chosen = places.gather(-1, order)[..., :count]
    missing = hidden.gather(-1, chosen)
    last = torch.iinfo(torch.int32).max
    chosen = chosen.masked_fill(missing, last).sort(dim=-1).values
    out[..., :count] = chosen.masked_fill(chosen == last, -1).int()
