"""Decodes of like length, side by side.

The pages of a group are gathered into memory that stays in the threads' own caches, and attended to at once, the heads
of a KV group stacked as rows. Gathering and attention are dealt out to threads request by request, so each thread
attends to what it gathered. What does not fit is taken in parts: in float32 by positions, merged by their LSE; in half
precision by heads, because the results of the parts would be rounded to half before they are merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attnlib.ops.torch.batch import Request
from attnlib.ops.torch.fused import FusedQuery
from attnlib.ops.torch.gather import PageBuffer, Scratch
from attnlib.ops.torch.mask import score_bias, visible_keys
from attnlib.ops.torch.paged import PagedInputs, visible_range
from attnlib.ops.torch.request import score_dtype

__all__ = ["attend_group", "group_requests"]

# Bytes of K that one thread gathers at a time, and as many of V: what its second-level cache holds with room to spare.
_GATHER_BYTES = 1 << 19
# So much more when pages are split by heads: reading them in slivers costs more than a detour through the next cache.
_HEAD_PARTS_FACTOR = 4


def group_requests(requests: list[Request], inputs: PagedInputs) -> Iterator[list[Request]]:
    """Requests of one query length and like numbers of pages: as many as are gathered at a time, or one per thread."""
    page_bytes = _page_bytes(inputs)
    sized = [(request.query_len, inputs.blocks(request).numel(), request) for request in requests]
    sized.sort(key=lambda entry: entry[:2], reverse=True)
    group: list[Request] = []
    query_len = widest = 0
    for length, num_pages, request in sized:
        full = (len(group) + 1) * widest * page_bytes > _gather_bytes() and len(
            group
        ) >= torch.get_num_threads()
        if group and (full or length != query_len or 4 * num_pages < 3 * widest):
            yield group
            group = []
        if not group:
            query_len, widest = length, num_pages
        group.append(request)
    if group:
        yield group


def attend_group(
    requests: list[Request],
    inputs: PagedInputs,
    dtype: torch.dtype,
    scratch: Scratch,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Write the rows of these requests, all of one query length; `dtype` is what to compute in."""
    group = _Group(requests, inputs)
    rows = torch.cat(
        [torch.arange(request.start, request.start + request.query_len) for request in requests]
    )
    query = inputs.query[rows].view(len(requests), -1, *inputs.query.shape[1:]).transpose(1, 2)
    ratio = query.shape[1] // inputs.key_cache.shape[2]
    by_heads = dtype in (torch.float16, torch.bfloat16)
    pages = [slice(0, group.width)] if by_heads else list(group.page_parts(dtype))
    for heads in group.head_parts() if by_heads else [slice(0, inputs.key_cache.shape[2])]:
        own = slice(heads.start * ratio, heads.stop * ratio)
        result, logs = group.attend(query[:, own], heads, own, pages, dtype, scratch)
        out[rows, own] = result.transpose(1, 2).flatten(0, 1).to(out.dtype)
        if lse is not None:
            lse[rows, own] = logs.transpose(1, 2).flatten(0, 1).to(lse.dtype)


@dataclass(frozen=True)
class _Group:
    """Requests of one query length; gathered key i of request r is its position `offsets[r] + i`."""

    requests: list[Request]
    inputs: PagedInputs

    @cached_property
    def tables(self) -> Tensor:
        """`[G, W]` page ids. A short row is padded with a page of its own: the copy of that is cleared and masked."""
        rows = [self.inputs.blocks(request) for request in self.requests]
        width = max(row.numel() for row in rows)
        padded = (
            row if row.numel() == width else torch.cat([row, row[:1].expand(width - row.numel())])
            for row in rows
        )
        return torch.stack(list(padded))

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """First and end of the positions that some row of each request may see."""
        return [visible_range(request, self.inputs.params) for request in self.requests]

    @property
    def width(self) -> int:
        return self.tables.shape[1]

    @property
    def block_size(self) -> int:
        return self.inputs.key_cache.shape[1]

    @cached_property
    def offsets(self) -> list[int]:
        return [start // self.block_size * self.block_size for start, _ in self.ranges]

    def head_parts(self) -> Iterator[slice]:
        """KV heads to gather at a time: as many as fit, and enough that no thread is idle."""
        num_kv_heads = self.inputs.key_cache.shape[2]
        head_bytes = self.tables.numel() * _page_bytes(self.inputs) // num_kv_heads
        step = max(
            _HEAD_PARTS_FACTOR * _gather_bytes() // head_bytes,
            -(-torch.get_num_threads() // len(self.requests)),
        )
        for head in range(0, num_kv_heads, step):
            yield slice(head, min(head + step, num_kv_heads))

    def page_parts(self, dtype: torch.dtype) -> Iterator[slice]:
        """Pages to gather at a time, counted in the dtype that they are attended to in."""
        page_bytes = (
            _page_bytes(self.inputs) // self.inputs.key_cache.element_size() * dtype.itemsize
        )
        step = max(1, _gather_bytes() // (page_bytes * len(self.requests)))
        for page in range(0, self.width, step):
            yield slice(page, min(page + step, self.width))

    def attend(
        self,
        query: Tensor,
        heads: slice,
        query_heads: slice,
        parts: list[slice],
        dtype: torch.dtype,
        scratch: Scratch,
    ) -> tuple[Tensor, Tensor]:
        """Output `[G, H, L, Dv]` and LSE `[G, H, L]` of some heads, the pages taken part by part.

        The loop holds next to no Python: threads that wait for their next piece of work longer than a moment fall
        asleep, and waking them costs more than the work.
        """
        inputs, params = self.inputs, self.inputs.params
        bias = (
            self.bias if self.bias is None or self.bias.shape[1] == 1 else self.bias[:, query_heads]
        )
        caches = [cache[:, :, heads] for cache in (inputs.key_cache, inputs.value_cache)]
        rows = FusedQuery(
            query, caches[0].shape[2], caches[1].shape[3], bias,
            replace(params, sinks=None if params.sinks is None else params.sinks[query_heads]),
            _for_heads(inputs.k_factor, heads), _for_heads(inputs.v_factor, heads), dtype=dtype,
        )  # fmt: skip
        keys = [slice(part.start * self.block_size, part.stop * self.block_size) for part in parts]
        tables = [self.tables[:, part].reshape(-1) for part in parts]
        sizes = sorted({table.numel() for table in tables}, reverse=True)
        buffers = {size: _GroupBuffer(caches, size, len(self.requests), scratch) for size in sizes}
        unseen = [self.unseen(part) for part in keys]
        results = []
        for part, table, blanks in zip(keys, tables, unseen, strict=True):
            key, value = buffers[table.numel()].load(table, blanks)
            results.append(rows.over(key, value, part))
        return rows.finished(results, keys)

    def unseen(self, keys: slice) -> list[tuple[int, slice]]:
        """Where gathered keys are positions that a request does not see, as (request, keys of the part): they are 0 (P5)."""
        blanks = []
        for member, ((start, end), offset) in enumerate(
            zip(self.ranges, self.offsets, strict=True)
        ):
            first, last = start - offset - keys.start, end - offset - keys.start
            if first > 0:
                blanks.append((member, slice(0, first)))
            if last < keys.stop - keys.start:
                blanks.append((member, slice(max(last, 0), None)))
        return blanks

    @cached_property
    def bias(self) -> Tensor | None:
        """`[G, 1 or Hq, L, S]` over all pages, or None when every row sees every gathered position."""
        num_keys, query_len = self.width * self.block_size, self.requests[0].query_len
        spans = zip(self.ranges, self.offsets, strict=True)
        filled = all((start, end) == (offset, offset + num_keys) for (start, end), offset in spans)
        if (
            filled
            and query_len == 1
            and self.inputs.params.alibi_slopes is None
            and self.inputs.params.query_bias is None
        ):
            return None
        positions = torch.tensor(
            [[request.first_position] for request in self.requests]
        ) + torch.arange(query_len)
        ends = torch.tensor([[[request.seq_len]] for request in self.requests])
        keys = torch.tensor(self.offsets)[:, None] + torch.arange(num_keys)
        causal = torch.tensor([[[bool(request.causal)]] for request in self.requests])
        visible = visible_keys(positions, keys, causal, self.inputs.params) & (
            keys.unsqueeze(1) < ends
        )
        own = (
            None
            if self.inputs.params.query_bias is None
            else self._span_bias(self.inputs.params.query_bias, num_keys)
        )
        return score_bias(
            positions, keys, visible, self.inputs.params, own, score_dtype(self.inputs.query)
        )

    def _span_bias(self, query_bias: Tensor, num_keys: int) -> Tensor:
        laid = query_bias.new_zeros(len(self.requests), self.requests[0].query_len, num_keys)
        for member, (request, offset) in enumerate(zip(self.requests, self.offsets, strict=True)):
            begin = max(request.first_position, offset)
            columns = slice(begin - request.first_position, request.query_len)
            laid[member, :, begin - offset : request.seq_len - offset] = query_bias[
                request.rows, columns
            ]
        return laid


class _GroupBuffer:
    """A page buffer seen request by request."""

    def __init__(
        self, caches: list[Tensor], num_pages: int, num_requests: int, scratch: Scratch
    ) -> None:
        self._pages = PageBuffer(caches, num_pages, scratch)
        key, value = (
            rows.view(num_requests, -1, *rows.shape[1:]).transpose(1, 2)
            for rows in self._pages.rows
        )
        self._sides = key, value

    def load(self, pages: Tensor, blanks: list[tuple[int, slice]]) -> tuple[Tensor, Tensor]:
        """Keys and values `[G, H, S, D]` of these pages, 0 in the given places; until the next load from the scratch."""
        self._pages.load(pages)
        for member, keys in blanks:
            for side in self._sides:
                side[member, :, keys].zero_()
        return self._sides


def _gather_bytes() -> int:
    return _GATHER_BYTES * torch.get_num_threads()


def _page_bytes(inputs: PagedInputs) -> int:
    """Bytes of one page of K or V, the larger."""
    return max(
        cache[:1].numel() * cache.element_size() for cache in (inputs.key_cache, inputs.value_cache)
    )


def _for_heads(factor: float | Tensor, heads: slice) -> float | Tensor:
    return factor[heads] if isinstance(factor, Tensor) and factor.numel() > 1 else factor
