"""Attention of many short queries over the paged cache.

On a CPU a decode is a matter of reading K and V once. Requests of like length are gathered side by side into one buffer
that stays in cache and go to fused attention together, the heads of a group stacked as rows; a request whose pages
follow each other in memory is read in place. What fused attention cannot say goes the way of `paged_prefill`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnlib.ops.torch.batch import Request, clear_tail, list_requests, on_host
from attnlib.ops.torch.fused import can_fuse, fused_attention
from attnlib.ops.torch.gather import contiguous_run, gather_blocks, gather_memory
from attnlib.ops.torch.mask import score_bias, visible_keys
from attnlib.ops.torch.paged import PagedInputs, attend_paged, visible_range
from attnlib.ops.torch.quant import compute_dtype, head_factor
from attnlib.ops.torch.request import score_dtype
from attnlib.ops.torch.rules import ScoreRules

__all__ = ["paged_decode"]

# Bytes of K gathered at a time, and as many of V: about what the second-level caches of two cores hold, and few calls.
_GATHER_BYTES = 8 << 20
# Rows per request up to which requests are batched; longer ones fill the kernel alone.
_BATCHED_ROWS = 8


@torch.no_grad()
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool | Tensor = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk_size: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_bias: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    out: Tensor,
    lse: Tensor | None = None,
    num_splits: int | None = None,
    workspace: Tensor | None = None,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """As `paged_prefill`, and right for any batch; quick on a CPU for queries of a few tokens.

    Args:
        num_splits: how often to split the keys. Plain torch never splits them, and the answer would be the same.
        workspace: scratch memory. Not needed here.

    The others are as in `paged_prefill`.
    """
    starts, lengths = on_host(query_start_loc, query_start_loc_cpu), on_host(seq_lens, seq_lens_cpu)
    rules = ScoreRules(scale, logits_soft_cap, alibi_slopes, window, attention_chunk_size, sinks)
    inputs = PagedInputs(
        query, key_cache, value_cache, block_table, query_bias, head_factor(k_scale), head_factor(v_scale)
    )
    dtype = compute_dtype(query, key_cache, inputs.k_factor, inputs.v_factor)
    batchable: list[Request] = []
    others = list_requests(starts, lengths, causal)
    if not batch_invariant and can_fuse(query.device, dtype, logits_soft_cap):
        batchable = [request for request in others if _is_batchable(request, inputs, rules)]
        taken = {request.index for request in batchable}
        others = [request for request in others if request.index not in taken]
    attend_paged(others, inputs, rules, out, lse, batch_invariant)
    for group in _groups(batchable, inputs, rules):
        _attend_group(group, inputs, rules, dtype, out, lse)
    clear_tail(out, lse, starts)


def _is_batchable(request: Request, inputs: PagedInputs, rules: ScoreRules) -> bool:
    """Short, with something to see, and not better read in place."""
    start, end = visible_range(request, rules)
    if request.query_len > _BATCHED_ROWS or request.first_position < 0 or end <= start:
        return False
    blocks = _blocks(request, inputs, rules)
    return contiguous_run(inputs.key_cache, blocks) is None or contiguous_run(inputs.value_cache, blocks) is None


def _blocks(request: Request, inputs: PagedInputs, rules: ScoreRules) -> Tensor:
    start, end = visible_range(request, rules)
    block_size = inputs.key_cache.shape[1]
    return inputs.block_table[request.index, start // block_size : -(-end // block_size)]


def _groups(requests: list[Request], inputs: PagedInputs, rules: ScoreRules) -> Iterator[list[Request]]:
    """Requests of one query length and like numbers of pages: as many as the gather buffer takes, or one per thread.

    Gathering and attention are dealt out to threads request by request, so each thread attends to what it gathered.
    """
    cache = max(inputs.key_cache, inputs.value_cache, key=lambda side: side.shape[3])
    block_bytes = cache[:1].numel() * cache.element_size()
    sized = [(request.query_len, _blocks(request, inputs, rules).numel(), request) for request in requests]
    sized.sort(key=lambda entry: entry[:2], reverse=True)
    group: list[Request] = []
    query_len = widest = 0
    for length, num_blocks, request in sized:
        full = (len(group) + 1) * widest * block_bytes > _GATHER_BYTES and len(group) >= torch.get_num_threads()
        if group and (full or length != query_len or 4 * num_blocks < 3 * widest):
            yield group
            group = []
        if not group:
            query_len, widest = length, num_blocks
        group.append(request)
    if group:
        yield group


def _attend_group(
    group: list[Request], inputs: PagedInputs, rules: ScoreRules, dtype: torch.dtype, out: Tensor, lse: Tensor | None
) -> None:
    block_size, num_kv_heads = inputs.key_cache.shape[1:3]
    tables = [_blocks(request, inputs, rules) for request in group]
    width = max(table.numel() for table in tables)
    # A short table is padded with a page of its own: the copy of that is cleared and masked.
    blocks = torch.cat([torch.cat([table, table[:1].expand(width - table.numel())]) for table in tables])
    offsets = [visible_range(request, rules)[0] // block_size * block_size for request in group]
    rows = torch.cat([torch.arange(request.start, request.start + request.query_len) for request in group])
    query = inputs.query[rows].view(len(group), group[0].query_len, *inputs.query.shape[1:]).transpose(1, 2)
    bias = _group_bias(group, inputs, rules, offsets, width * block_size)
    ratio = query.shape[1] // num_kv_heads
    for heads in _head_parts(inputs, blocks.numel(), len(group)):
        own = slice(heads.start * ratio, heads.stop * ratio)
        key, value = _gather_group(inputs, blocks, heads, group, offsets, rules)
        result, logs = fused_attention(
            query[:, own], key, value, bias if bias is None or bias.shape[1] == 1 else bias[:, own],
            rules.for_heads(own), _for_heads(inputs.k_factor, heads), _for_heads(inputs.v_factor, heads), dtype=dtype,
        )  # fmt: skip
        out[rows, own] = result.transpose(1, 2).flatten(0, 1).to(out.dtype)
        if lse is not None:
            lse[rows, own] = logs.transpose(1, 2).flatten(0, 1).to(lse.dtype)


def _head_parts(inputs: PagedInputs, num_blocks: int, num_requests: int) -> Iterator[slice]:
    """KV heads to gather at a time: as many as the buffer takes, and enough that no thread is idle."""
    num_kv_heads = inputs.key_cache.shape[2]
    cache = max(inputs.key_cache, inputs.value_cache, key=lambda side: side.shape[3])
    head_bytes = num_blocks * cache.shape[1] * cache.shape[3] * cache.element_size()
    step = max(_GATHER_BYTES // head_bytes, -(-torch.get_num_threads() // num_requests))
    for head in range(0, num_kv_heads, step):
        yield slice(head, min(head + step, num_kv_heads))


def _gather_group(
    inputs: PagedInputs, blocks: Tensor, heads: slice, group: list[Request], offsets: list[int], rules: ScoreRules
) -> list[Tensor]:
    """Keys and values `[G, H, S, D]`: each request's pages side by side, 0 where it has no visible position (P5)."""
    caches = [cache[:, :, heads] for cache in (inputs.key_cache, inputs.value_cache)]
    sizes = [blocks.numel() * cache[:1].numel() * cache.element_size() for cache in caches]
    begins = [0, -(-sizes[0] // 64) * 64]
    memory = gather_memory(begins[1] + sizes[1])
    sides = []
    for cache, begin in zip(caches, begins, strict=True):
        pages = gather_blocks(cache, blocks, memory[begin:]).transpose(0, 1)
        pages = pages.view(pages.shape[0], len(group), -1, pages.shape[2])
        for member, (request, offset) in enumerate(zip(group, offsets, strict=True)):
            start, end = visible_range(request, rules)
            pages[:, member, : start - offset].zero_()
            pages[:, member, end - offset :].zero_()
        sides.append(pages.transpose(0, 1))
    return sides


def _group_bias(
    group: list[Request], inputs: PagedInputs, rules: ScoreRules, offsets: list[int], num_keys: int
) -> Tensor | None:
    """`[G, 1 or Hq, L, S]`, or None when every row sees every gathered position."""
    query_len = group[0].query_len
    ranges = [visible_range(request, rules) for request in group]
    filled = all(
        (start, end) == (offset, offset + num_keys) for (start, end), offset in zip(ranges, offsets, strict=True)
    )
    plain = rules.alibi_slopes is None and inputs.query_bias is None and query_len == 1
    if filled and plain:
        return None
    first = torch.tensor([[request.first_position] for request in group])
    ends = torch.tensor([[[request.seq_len]] for request in group])
    positions = first + torch.arange(query_len)
    keys = torch.tensor(offsets)[:, None] + torch.arange(num_keys)
    causal = torch.tensor([[[bool(request.causal)]] for request in group])
    visible = visible_keys(positions, keys, causal, rules) & (keys.unsqueeze(1) < ends)
    own = _group_span_bias(group, inputs.query_bias, offsets, num_keys)
    return score_bias(positions, keys, visible, rules, own, score_dtype(inputs.query))


def _group_span_bias(
    group: list[Request], query_bias: Tensor | None, offsets: list[int], num_keys: int
) -> Tensor | None:
    if query_bias is None:
        return None
    laid = query_bias.new_zeros(len(group), group[0].query_len, num_keys)
    for member, (request, offset) in enumerate(zip(group, offsets, strict=True)):
        begin = max(request.first_position, offset)
        columns = slice(begin - request.first_position, request.query_len)
        laid[member, :, begin - offset : request.seq_len - offset] = query_bias[request.rows, columns]
    return laid


def _for_heads(factor: float | Tensor, heads: slice) -> float | Tensor:
    return factor[heads] if isinstance(factor, Tensor) and factor.numel() > 1 else factor
