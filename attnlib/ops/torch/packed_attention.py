"""Attention over the packed cache of vLLM's PagedAttention, and its cache write, in plain torch.

The reference of `ops.triton.packed_attention`. The blocks in use are copied to the layout of the
P-rules, so lengths are read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.block_sparse import BlockSparsePattern
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.cache_write import write_kv
from attnlib.ops.torch.general import general_attention
from attnlib.ops.torch.paged_decode import paged_decode
from attnlib.ops.torch.quant import head_factor, is_quantized
from attnlib.ops.torch.request import KeySpan, QueryRows, attend_rows
from attnlib.ops.torch.row_terms import rows_bias, score_dtype

__all__ = ["packed_decode", "packed_prefill", "packed_write"]


@torch.no_grad()
@without_autocast
def packed_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_seq_len: int,
    out: Tensor,
    pattern: BlockSparsePattern | None = None,
    kernels: str = "auto",
) -> None:
    """Attention of one query token per request over the packed cache.

    Args:
        query: `[R, Hq, D]`.
        key_cache: `[B, Hkv, D / x, N, x]`; float8 holds key / k_scale.
        value_cache: `[B, Hkv, D, N]`, likewise.
        block_table: `[R, M]`, block ids; entries at or past ceil(seq_len / N) are not read.
        seq_lens: `[R]`, keys of each request, the query's own included.
        params: scale, ALiBi slopes and KV scales.
        max_seq_len: upper bound of the sequence lengths. Ignored: the lengths themselves are read.
        out: `[R, Hq, D]`, written.
        pattern: the keys that each head sees; None for all.
        kernels: ignored; see `attnlib.ops.triton.packed_attention`.
    """
    lengths = seq_lens.cpu()
    key, value, table = _common_form(key_cache, value_cache, block_table, lengths)
    if pattern is None:
        starts = torch.arange(query.shape[0] + 1, dtype=torch.int32, device="cpu")
        paged_decode(
            query, key, value, table, starts, lengths, params, max_query_len=1,
            max_seq_len=max_seq_len, out=out, query_start_loc_cpu=starts, seq_lens_cpu=lengths,
        )  # fmt: skip
        return
    factors = head_factor(params.k_scale), head_factor(params.v_scale)
    for request, seq_len in enumerate(lengths.tolist()):
        pages = table[request].long()
        keys, values = (cache[pages].flatten(0, 1)[:seq_len] for cache in (key, value))
        own = query[request : request + 1]
        out[request] = _block_sparse_decode(own, keys, values, params, pattern, *factors)[0]


@torch.no_grad()
@without_autocast
def packed_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_query_len: int,
    out: Tensor,
) -> None:
    """Causal attention of new tokens over their cached context and each other.

    Args:
        query: `[T, Hq, D]`.
        key: `[T, Hkv, D]`, keys of the new tokens; used as given, without a scale.
        value: `[T, Hkv, D]`, likewise.
        key_cache: `[B, Hkv, D / x, N, x]`, read for the seq_len - query_len context positions.
        value_cache: `[B, Hkv, D, N]`, likewise.
        block_table: `[R, M]`, block ids.
        query_start_loc: `[R + 1]`, the first new token of each request.
        seq_lens: `[R]`, context and new tokens.
        params: scale, window (left), ALiBi slopes and KV scales of the context.
        max_query_len: upper bound of the query lengths. Ignored: the lengths themselves are read.
        out: `[T, Hq, D]`, written; rows at or past `query_start_loc[-1]` become 0 (M6).
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    before = [n - (starts[r + 1] - starts[r]) for r, n in enumerate(lengths)]
    contexts = torch.tensor(before, dtype=torch.int64, device="cpu")
    old_key, old_value, table = _common_form(key_cache, value_cache, block_table, contexts)
    out[starts[-1] :] = 0
    for request, context in enumerate(contexts.tolist()):
        tokens = slice(starts[request], starts[request + 1])
        keys = _with_context(old_key, table[request], context, params.k_scale, key[tokens])
        values = _with_context(old_value, table[request], context, params.v_scale, value[tokens])
        rows = QueryRows(query[tokens], context, lengths[request], context, True)
        attend_rows(rows, KeySpan(keys, values), params, out[tokens], None)


def packed_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
) -> None:
    """Write the keys and values of a step to their slots in the packed cache (P4).

    Args:
        key: `[T', Hkv, D]` with T' >= T.
        value: `[T', Hkv, D]`, likewise.
        key_cache: `[B, Hkv, D / x, N, x]`; float8 holds key / k_scale, saturated.
        value_cache: `[B, Hkv, D, N]`, likewise.
        slot_mapping: `[T]` int64; a negative slot writes nothing.
        k_scale: real key = stored key * k_scale; a number, a 0-d or `[Hkv]` float32 tensor. Read
            for float8 only.
        v_scale: the same for values.

    Raises:
        ContractError: as `write_kv`.
    """
    num_heads, groups, x = key_cache.shape[1], key_cache.shape[2], key_cache.shape[4]
    # With each group of x elements as a head, the packed keys have the layout of the P-rules.
    packed = key_cache.permute(0, 3, 1, 2, 4).flatten(2, 3)
    factor = head_factor(k_scale)
    if isinstance(factor, Tensor) and factor.numel() == num_heads:
        factor = factor.repeat_interleave(groups)
    write_kv(
        key.reshape(key.shape[0], num_heads * groups, x), value, packed,
        value_cache.permute(0, 3, 1, 2), slot_mapping, k_scale=factor, v_scale=v_scale,
    )  # fmt: skip


def _common_form(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of the blocks in use, in the layout of the P-rules.

    Args:
        key_cache: `[B, Hkv, D / x, N, x]`.
        value_cache: `[B, Hkv, D, N]`.
        block_tables: `[R, M]`, block ids.
        lengths: `[R]` on the CPU, positions in use per request.

    Returns:
        Keys and values `[n, N, Hkv, D]`, and an int32 block table `[R, max blocks]` into them.
    """
    block_size = value_cache.shape[3]
    counts = [-(-length // block_size) for length in lengths.tolist()]
    used = [block_tables[request, :count] for request, count in enumerate(counts)]
    blocks = torch.cat(used) if used else block_tables.new_empty(0)
    key, value = (
        _block_bytes(cache).index_select(0, blocks).view(cache.dtype)
        for cache in (key_cache, value_cache)
    )
    table = torch.zeros(
        len(counts), max(counts, default=0), dtype=torch.int32, device=block_tables.device
    )
    first = 0
    for request, count in enumerate(counts):
        table[request, :count] = torch.arange(first, first + count, device=table.device)
        first += count
    return (
        key.permute(0, 3, 1, 2, 4).flatten(3).contiguous(),
        value.permute(0, 3, 1, 2).contiguous(),
        table,
    )


def _with_context(
    cache: Tensor, table_row: Tensor, context: int, scale: float | Tensor, new: Tensor
) -> Tensor:
    """Keys or values of one request: the dequantized context, then the new rows.

    Args:
        cache: `[n, N, Hkv, D]`, as `_common_form` returns it.
        table_row: `[M]`, the request's blocks in `cache`.
        context: number of cached positions.
        scale: scale of a float8 cache; ignored for other dtypes.
        new: `[query_len, Hkv, D]`.

    Returns:
        `[context + query_len, Hkv, D]`.
    """
    old = cache[table_row.long()].flatten(0, 1)[:context]
    if is_quantized(cache.dtype):
        factor = head_factor(scale)
        old = old.float() * (factor.view(-1, 1) if isinstance(factor, Tensor) else factor)
    return torch.cat([old, new.to(old.dtype)])


def _block_bytes(cache: Tensor) -> Tensor:
    """float8 as uint8, because indexing float8 is not implemented on every device."""
    return cache.view(torch.uint8) if is_quantized(cache.dtype) else cache


def _block_sparse_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    pattern: BlockSparsePattern,
    k_factor: float | Tensor = 1.0,
    v_factor: float | Tensor = 1.0,
) -> Tensor:
    """Block-sparse attention of one request's last token.

    Args:
        query: `[1, Hq, D]`.
        key: `[S, Hkv, D]`, all keys of the request, the query's own last.
        value: `[S, Hkv, Dv]`.
        params: how scores are computed.
        pattern: which keys each head sees.
        k_factor: factor of stored keys, a float or `[1]` or `[Hkv]`.
        v_factor: factor of stored values, likewise.

    Returns:
        `[1, Hq, Dv]` float32 (float64 for a float64 query).
    """
    seq_len = key.shape[0]
    rows = QueryRows(query, seq_len - 1, seq_len, seq_len - 1, True)
    bias = rows_bias(rows, 0, seq_len, params)
    hidden = ~pattern.visible(seq_len, query.device)
    if bias is None:
        bias = torch.zeros(hidden.shape, dtype=score_dtype(query), device=query.device)
    return general_attention(
        query, key, value, bias.masked_fill(hidden, -torch.inf), params, k_factor, v_factor
    )[0]
