"""Prefills of latent attention in the expanded form: keys and values of every head are computed
from the latents, those of the context in chunks of bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

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
    new, *chunks = _plan(batch, latent_attention.context_tokens, cache.block_size)
    sinks = layer.impl.per_head_tensors[1]
    params = AttentionParams(
        scale=layer.impl.scale, logits_soft_cap=spec.logits_soft_cap or 0.0, sinks=sinks
    )
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    _attend(latent_attention, query, latent[new.place], new, batch, params, out, lse)
    if not chunks:
        return
    # A sink counts once (M4): it is part of the state of the new tokens.
    params = AttentionParams(
        scale=params.scale, logits_soft_cap=params.logits_soft_cap, causal=False
    )
    part = torch.empty_like(out), torch.empty_like(lse)
    merge = operation("merge_states", "merge_states", query)
    for chunk in chunks:
        requests, columns, offsets = chunk.place
        latents = cache.key_cache[batch.block_table[requests, columns].long(), offsets, 0]
        _attend(latent_attention, query, latents, chunk, batch, params, *part)
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
    projection, key_size = latent_attention.projection, latent_attention.key_size
    size, heads = latent_attention.spec.head_size_v, latent_attention.spec.num_heads
    keys = query.new_empty(latents.shape[0], heads, query.shape[2])
    values = query.new_empty(latents.shape[0], heads, latent_attention.head_size_v)
    # A product of each head writes between the rotary parts, which a concatenation would copy.
    of_heads, weights = latents[:, :size].expand(heads, -1, -1), projection.transpose(1, 2)
    torch.bmm(of_heads, weights[..., :key_size], out=keys[..., :key_size].transpose(0, 1))
    torch.bmm(of_heads, weights[..., key_size:], out=values.transpose(0, 1))
    keys[..., key_size:] = latents[:, None, size:]
    operation("paged_prefill", "paged_prefill", query)(
        query,
        keys.view(-1, _BLOCK, heads, keys.shape[2]),
        values.view(-1, _BLOCK, heads, values.shape[2]),
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
        counters=rows.counters,
    )


class _Rows(NamedTuple):
    """Rows of several requests in blocks: each request begins a block, and the rest of its last
    block repeats its first row.

    Attributes:
        place: `[blocks * _BLOCK]` int64 each: of new tokens the token of each row in the batch, of
            context its request, the column of the block table and the place in the block.
        table: `[R, most blocks]` int32.
        lengths: `[R]` int32, rows of each request; `lengths_cpu` is its host copy.
        longest: the longest request.
        counters: `[2]` int32 zeros, with which the kernel distributes work.
    """

    place: tuple[Tensor, ...]
    table: Tensor
    lengths: Tensor
    lengths_cpu: Tensor
    longest: int
    counters: Tensor


class _Plan(NamedTuple):
    """The rows of a batch, and the lengths on the host from which they follow."""

    starts: Tensor
    seq_lens: Tensor
    rows: list[_Rows]


def _plan(batch: PagedMetadata, context_tokens: int, block_size: int) -> list[_Rows]:
    """The new tokens of a batch, then the chunks of its context; arranged once for all layers, and
    again where lengths have changed in place.

    Args:
        batch: prefills with lengths on the host.
        context_tokens: latents of the context in a chunk, at most.
        block_size: of the cache.
    """
    assert batch.query_start_loc_cpu is not None and batch.seq_lens_cpu is not None
    given = batch.query_start_loc_cpu, batch.seq_lens_cpu
    key = "expanded prefills", context_tokens, block_size
    found: _Plan | None = batch.plans.get(key)
    if found is not None and all(map(torch.equal, found[:2], given)):
        return found.rows
    starts, seq_lens = (each.clone() for each in given)
    counts, device = starts.long().diff(), batch.query_start_loc.device
    contexts = seq_lens.long() - counts
    step = max(1, context_tokens // max(1, int((contexts > 0).sum())))
    rows = [_in_blocks(starts[:-1].long(), counts, None, device)]
    for first in range(0, int(contexts.amax()), step):
        firsts, lengths = torch.full_like(contexts, first), (contexts - first).clamp(0, step)
        rows.append(_in_blocks(firsts, lengths, block_size, device))
    batch.plans[key] = _Plan(starts, seq_lens, rows)
    return rows


def _in_blocks(
    firsts: Tensor, lengths: Tensor, block_size: int | None, device: torch.device
) -> _Rows:
    """Rows of requests in blocks.

    Args:
        firsts, lengths: `[R]` int64 on the host, the first row of each request and how many.
        block_size: of the cache that has the rows; None for rows of the batch.
        device: of the batch.
    """
    blocks = (lengths + (_BLOCK - 1)) // _BLOCK
    blocks[0] += not blocks.any()  # one block that nobody reads
    begins = blocks.cumsum(0) - blocks
    requests = torch.arange(len(blocks), device="cpu").repeat_interleave(blocks * _BLOCK)
    offsets = torch.arange(len(requests), device="cpu") - begins[requests] * _BLOCK
    tokens = firsts[requests] + torch.where(offsets < lengths[requests], offsets, 0)
    columns = torch.arange(int(blocks.amax()), device="cpu")
    table = torch.where(columns < blocks[:, None], begins[:, None] + columns, 0)
    lengths_cpu, counters = lengths.int(), torch.zeros(2, dtype=torch.int32, device="cpu")
    place = (
        [tokens] if block_size is None else [requests, tokens // block_size, tokens % block_size]
    )
    # From pinned memory: other copies of this size wait for the kernels before them.
    host = [torch.stack(place), table.int(), lengths_cpu, counters]
    if device.type == "cuda":
        host = [each.pin_memory() for each in host]
    rows, table, there, counters = (each.to(device, non_blocking=True) for each in host)
    return _Rows(rows.unbind(), table, there, lengths_cpu, int(lengths.amax()), counters)
