"""Prefills of latent attention in the expanded form: keys and values of every head are computed
from the latents, those of the context in chunks of bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnlib.cache.storage import PagedKVCache
from attnlib.layer.call import LayerCall
from attnlib.layer.checks import check_call
from attnlib.metadata.paged import PagedMetadata
from attnlib.ops.dispatch import operation
from attnlib.ops.params import AttentionParams

if TYPE_CHECKING:
    from attnlib.mla.latent_attention import LatentAttention

__all__ = ["attend_expanded"]

_BLOCK = 128
"""Block size of expanded keys, a multiple of which each request occupies."""


def attend_expanded(
    latent_attention: LatentAttention,
    query: Tensor,
    latent: Tensor,
    cache: PagedKVCache,
    batch: PagedMetadata,
    out: Tensor,
) -> None:
    """Write the latents of prefills and attend.

    Args:
        latent_attention: the layer.
        query, latent, cache: as in `LatentAttention.forward`, of the prefills.
        batch: the prefills, with lengths on the host.
        out: `[T, Hq, V]`, written.
    """
    _write(latent_attention, query, latent, cache, batch)
    layer, spec = latent_attention.layer, latent_attention.spec
    assert batch.block_table is not None
    assert batch.query_start_loc_cpu is not None and batch.seq_lens_cpu is not None
    starts, seq_lens = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu.tolist()
    counts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    contexts = [length - count for length, count in zip(seq_lens, counts, strict=True)]
    sinks = layer.impl.per_head_tensors[1]
    params = AttentionParams(
        scale=layer.impl.scale, logits_soft_cap=spec.logits_soft_cap or 0.0, sinks=sinks
    )
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    rows = _Rows(starts[:-1], counts, query.device)
    _attend(latent_attention, query, latent[rows.index], rows, batch, params, out, lse)
    # A sink counts once (M4): it is part of the state of the new tokens.
    params = AttentionParams(
        scale=params.scale, logits_soft_cap=params.logits_soft_cap, causal=False
    )
    longest, held = max(contexts, default=0), latent_attention.context_tokens
    step = max(1, held // max(1, sum(length > 0 for length in contexts)))
    part = torch.empty_like(out), torch.empty_like(lse)
    merge = operation("merge_states", "merge_states", query)
    for first in range(0, longest, step):
        lengths = [min(max(length - first, 0), step) for length in contexts]
        rows = _Rows([first] * len(lengths), lengths, query.device)
        blocks = batch.block_table[rows.requests, rows.index // cache.block_size].long()
        latents = cache.key_cache[blocks, rows.index % cache.block_size, 0]
        _attend(latent_attention, query, latents, rows, batch, params, *part)
        merge(out, lse, *part, out, lse)


def _write(
    latent_attention: LatentAttention,
    query: Tensor,
    latent: Tensor,
    cache: PagedKVCache,
    batch: PagedMetadata,
) -> None:
    """Check the call, and write the new latents where the batch has slots."""
    spec, layer, key = latent_attention.spec, latent_attention.layer, latent[:, None]
    value = key[..., : spec.head_size_v]
    absorbed = query.as_strided((query.shape[0], spec.num_heads, spec.head_size), (0, 0, 1))
    if batch.slot_mapping is None:
        check_call(layer, LayerCall(absorbed, None, None, cache, batch))
    else:
        check_call(layer, LayerCall(absorbed, key, value, cache, batch))
        layer.impl.write_kv(key, value, cache, batch.slot_mapping)


def _attend(
    latent_attention: LatentAttention,
    query: Tensor,
    latents: Tensor,
    rows: _Rows,
    batch: PagedMetadata,
    params: AttentionParams,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention to the keys and values of some latents of every request."""
    projection = latent_attention.projection
    size, heads = latent_attention.spec.head_size_v, latent_attention.spec.num_heads
    both = nn.functional.linear(latents[:, :size], projection.flatten(0, 1))
    both = both.view(-1, heads, projection.shape[1])
    keys, values = both[..., : latent_attention.key_size], both[..., latent_attention.key_size :]
    rotary = latents[:, None, size:].expand(-1, heads, -1)
    keys = torch.cat((keys, rotary), dim=-1).view(-1, _BLOCK, heads, query.shape[2])
    values = values.view(-1, _BLOCK, heads, latent_attention.head_size_v)
    operation("paged_prefill", "paged_prefill", query)(
        query,
        keys,
        values,
        rows.table,
        batch.query_start_loc,
        rows.lengths,
        params,
        max_query_len=batch.max_query_len,
        max_seq_len=rows.longest,
        out=out,
        lse=lse,
        query_start_loc_cpu=batch.query_start_loc_cpu,
        seq_lens_cpu=rows.lengths_cpu,
    )


class _Rows:
    """Rows of several requests in blocks: each request begins a block, and the rest of its last
    block repeats its first row.

    Args:
        firsts: index of the first row of each request.
        lengths: rows of each request.
        device: of the tensors.

    Attributes:
        index: `[blocks * _BLOCK]` int64, the index of each row.
        requests: `[blocks * _BLOCK]` int64, the request of each row.
        table: `[R, most blocks]` int32.
        lengths: `[R]` int32; `lengths_cpu` is its host copy.
        longest: the longest request.
    """

    def __init__(self, firsts: list[int], lengths: list[int], device: torch.device) -> None:
        blocks = [-(-length // _BLOCK) for length in lengths]
        self.longest = max(lengths, default=0)
        table = torch.zeros(len(lengths), max([1, *blocks]), dtype=torch.int32, device="cpu")
        index, requests, used = [], [], 0
        for request, (first, length, count) in enumerate(zip(firsts, lengths, blocks, strict=True)):
            table[request, :count] = torch.arange(used, used + count, device="cpu")
            used += count
            offsets = torch.arange(count * _BLOCK, device="cpu")
            index.append(first + torch.where(offsets < length, offsets, 0))
            requests.append(torch.full_like(offsets, request))
        if not used:  # one block that nobody reads
            index = requests = [torch.zeros(_BLOCK, dtype=torch.int64, device="cpu")]
        self.lengths_cpu = torch.tensor(lengths, dtype=torch.int32, device="cpu")
        self.index = torch.cat(index).to(device, non_blocking=True)
        self.requests = torch.cat(requests).to(device, non_blocking=True)
        self.table = table.to(device, non_blocking=True)
        self.lengths = self.lengths_cpu.to(device, non_blocking=True)
