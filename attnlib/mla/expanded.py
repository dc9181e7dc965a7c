"""Prefills of latent attention in the expanded form: keys and values of every head are computed
from the latents, those of the context in chunks of bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlib.cache.storage import PagedKVCache
from attnlib.layer.call import LayerCall, call_signature
from attnlib.layer.checks import check_call
from attnlib.metadata.paged import PagedMetadata
from attnlib.mla.expanded_rows import BLOCK, Rows, gather, plan_rows
from attnlib.ops.dispatch import operation
from attnlib.ops.params import AttentionParams

if TYPE_CHECKING:
    from attnlib.mla.latent_attention import LatentAttention

__all__ = ["attend_expanded"]


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
    new, *chunks = plan_rows(batch, latent_attention.context_tokens, cache.block_size)
    sinks = layer.impl.per_head_tensors[1]
    params = AttentionParams(
        scale=layer.impl.scale, logits_soft_cap=spec.logits_soft_cap or 0.0, sinks=sinks
    )
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    _attend(latent_attention, query, latent[new.place[0]], new, batch, params, out, lse)
    if not chunks:
        return
    # A sink counts once (M4): it is part of the state of the new tokens.
    params = AttentionParams(
        scale=params.scale, logits_soft_cap=params.logits_soft_cap, causal=False
    )
    part = torch.empty_like(out), torch.empty_like(lse)
    merge = operation("merge_states", "merge_states", query)
    for chunk in chunks:
        latents = gather(cache.key_cache, batch.block_table, chunk.place)
        _attend(latent_attention, query, latents, chunk, batch, params, *part)
        merge(out, lse, *part, out, lse)


def _write(
    latent_attention: LatentAttention,
    query: Tensor,
    latent: Tensor,
    cache: PagedKVCache,
    batch: PagedMetadata,
) -> None:
    """Check the call, once per kind of call and batch, and write the new latents where the batch
    has slots."""
    spec, layer = latent_attention.spec, latent_attention.layer
    key = value = None
    if batch.slot_mapping is not None:
        key = latent[:, None]
        value = key[..., : spec.head_size_v]
    call = LayerCall(query, key, value, cache, batch)
    signature = "expanded call", call_signature(layer, call)
    if signature not in batch.plans:
        absorbed = query.as_strided((query.shape[0], spec.num_heads, spec.head_size), (0, 0, 1))
        check_call(layer, call._replace(query=absorbed))
        batch.plans[signature] = None
    if key is not None and value is not None:
        assert batch.slot_mapping is not None
        layer.impl.write_kv(key, value, cache, batch.slot_mapping)


def _attend(
    latent_attention: LatentAttention,
    query: Tensor,
    latents: Tensor,
    rows: Rows,
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
        keys.view(-1, BLOCK, heads, keys.shape[2]),
        values.view(-1, BLOCK, heads, values.shape[2]),
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
