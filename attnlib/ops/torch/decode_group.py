"""Batched decodes of similar length.

The blocks of a group are gathered into a buffer that fits the threads' caches, and the whole group
is one call of fused attention, with the query heads of a KV head stacked as rows. torch distributes
both the gather and the attention to threads by request, so each thread attends to what it gathered.
Data beyond the buffer is processed in several steps: in float32 over splits of the keys, which are
combined by their LSE; in half precision over groups of heads, because fused attention would round
the result of each split to half precision before the combination.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlib.ops.torch.batch import Request
from attnlib.ops.torch.fused import FusedQuery
from attnlib.ops.torch.gather import Scratch
from attnlib.ops.torch.group_buffer import GroupBuffer, _block_bytes, _gather_bytes
from attnlib.ops.torch.mask import score_bias, visible_keys
from attnlib.ops.torch.paged import PagedInputs, visible_range
from attnlib.ops.torch.row_terms import score_dtype

__all__ = ["Group", "attend_group", "group_requests"]

# Factor of that limit when blocks are split by heads: short reads from each block cost more than
# exceeding the level-2 cache.
_HEAD_SPLIT_FACTOR = 4


def group_requests(requests: list[Request], inputs: PagedInputs) -> Iterator[list[Request]]:
    """Groups of requests with equal query lengths and similar numbers of blocks.

    A group ends when it fills the gather buffer, but not before it has one request per thread.
    """
    block_bytes = _block_bytes(inputs)
    sized = [(request.query_len, inputs.blocks(request).numel(), request) for request in requests]
    sized.sort(key=lambda item: item[:2], reverse=True)
    group: list[Request] = []
    query_len = most_blocks = 0
    for length, num_blocks, request in sized:
        full = (
            len(group) >= torch.get_num_threads()
            and (len(group) + 1) * most_blocks * block_bytes > _gather_bytes()
        )
        if group and (full or length != query_len or 4 * num_blocks < 3 * most_blocks):
            yield group
            group = []
        if not group:
            query_len, most_blocks = length, num_blocks
        group.append(request)
    if group:
        yield group


def attend_group(
    group: Group,
    inputs: PagedInputs,
    dtype: torch.dtype,
    scratch: Scratch,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Write `out` and `lse` for the requests of a group; computes in `dtype`."""
    rows = group.rows
    query = inputs.query[rows].view(len(group.requests), -1, *inputs.query.shape[1:])
    query = query.transpose(1, 2)
    ratio = query.shape[1] // inputs.key_cache.shape[2]
    by_heads = dtype in (torch.float16, torch.bfloat16)
    splits = [slice(0, group.width)] if by_heads else list(group.block_splits(inputs, dtype))
    head_groups = group.head_groups(inputs) if by_heads else [slice(0, inputs.key_cache.shape[2])]
    for kv_heads in head_groups:
        heads = slice(kv_heads.start * ratio, kv_heads.stop * ratio)
        states = query[:, heads], kv_heads, heads, splits
        result, logs = group.attend(*states, inputs, dtype, scratch)
        out[rows, heads] = result.transpose(1, 2).flatten(0, 1).to(out.dtype)
        if lse is not None:
            lse[rows, heads] = logs.transpose(1, 2).flatten(0, 1).to(lse.dtype)


@dataclass(frozen=True, eq=False)
class Group:
    """Requests of one query length. Gathered key i of request r has position `offsets[r] + i`.

    Attributes:
        requests: the requests.
        rows: `[G * L]` their query tokens.
        tables: `[G, W]` block ids. Short rows repeat their first block; those copies are masked.
        ranges: for each request, the half-open range of positions visible to some row.
        block_size: positions per block.
        bias: `[G, 1 or Hq, L, S]` over all blocks; None if every row sees every gathered key.
    """

    requests: list[Request]
    rows: Tensor
    tables: Tensor
    ranges: list[tuple[int, int]]
    block_size: int
    bias: Tensor | None = None

    @classmethod
    def of(cls, requests: list[Request], inputs: PagedInputs) -> Group:
        """The group of these requests."""
        spans = ((request.start, request.rows.stop) for request in requests)
        tokens = [torch.arange(*span, device="cpu") for span in spans]
        blocks = [inputs.blocks(request) for request in requests]
        width = max(row.numel() for row in blocks)
        padded = (
            row if row.numel() == width else torch.cat([row, row[:1].expand(width - row.numel())])
            for row in blocks
        )
        ranges = [visible_range(request, inputs.params) for request in requests]
        size = inputs.key_cache.shape[1]
        group = cls(requests, torch.cat(tokens), torch.stack(list(padded)), ranges, size)
        return replace(group, bias=group.make_bias(inputs))

    @property
    def width(self) -> int:
        """W, the most blocks of one request."""
        return self.tables.shape[1]

    @property
    def offsets(self) -> list[int]:
        """For each request, the position of its first gathered key."""
        return [start // self.block_size * self.block_size for start, _ in self.ranges]

    def head_groups(self, inputs: PagedInputs) -> Iterator[slice]:
        """KV heads per step: as many as fit the buffer, and enough to give every thread work."""
        num_kv_heads = inputs.key_cache.shape[2]
        head_bytes = self.tables.numel() * _block_bytes(inputs) // num_kv_heads
        step = max(
            _HEAD_SPLIT_FACTOR * _gather_bytes() // head_bytes,
            -(-torch.get_num_threads() // len(self.requests)),
        )
        for head in range(0, num_kv_heads, step):
            yield slice(head, min(head + step, num_kv_heads))

    def block_splits(self, inputs: PagedInputs, dtype: torch.dtype) -> Iterator[slice]:
        """Blocks per step: as many as fit the buffer once they are converted to `dtype`."""
        element_size = inputs.key_cache.element_size()
        block_bytes = _block_bytes(inputs) // element_size * dtype.itemsize
        step = max(1, _gather_bytes() // (block_bytes * len(self.requests)))
        for block in range(0, self.width, step):
            yield slice(block, min(block + step, self.width))

    def attend(
        self,
        query: Tensor,
        kv_heads: slice,
        heads: slice,
        splits: list[slice],
        inputs: PagedInputs,
        dtype: torch.dtype,
        scratch: Scratch,
    ) -> tuple[Tensor, Tensor]:
        """Attention of some heads over all splits of the blocks.

        Everything that the loop needs is prepared before it: OpenMP threads that wait longer than a
        moment for the next parallel region go to sleep, and waking them costs more than the work.

        Returns:
            Output `[G, H, L, Dv]` and LSE `[G, H, L]`.
        """
        params, bias = inputs.params, self.bias
        if bias is not None and bias.shape[1] > 1:
            bias = bias[:, heads]
        caches = [cache[:, :, kv_heads] for cache in (inputs.key_cache, inputs.value_cache)]
        rows = FusedQuery(
            query,
            caches[0].shape[2],
            caches[1].shape[3],
            bias,
            replace(params, sinks=None if params.sinks is None else params.sinks[heads]),
            inputs.k_factor,  # a tensor of them has the heads of the only group (`by_heads`)
            inputs.v_factor,
            dtype=dtype,
        )
        size = self.block_size
        spans = [slice(split.start * size, split.stop * size) for split in splits]
        tables = [self.tables[:, split].reshape(-1) for split in splits]
        counts = sorted({table.numel() for table in tables}, reverse=True)
        buffers = {
            count: GroupBuffer(caches, count, len(self.requests), scratch) for count in counts
        }
        invisible = [self.invisible_keys(span) for span in spans]
        results = []
        for span, table, hidden in zip(spans, tables, invisible, strict=True):
            key, value = buffers[table.numel()].load(table, hidden)
            results.append(rows.attend(key, value, span))
        return rows.combine(results, spans)

    def invisible_keys(self, span: slice) -> list[tuple[int, slice]]:
        """The gathered keys of a split that no row sees, as (request, keys of the split) (P5)."""
        found = []
        for member, ((start, end), offset) in enumerate(
            zip(self.ranges, self.offsets, strict=True)
        ):
            first, last = start - offset - span.start, end - offset - span.start
            if first > 0:
                found.append((member, slice(0, first)))
            if last < span.stop - span.start:
                found.append((member, slice(max(last, 0), None)))
        return found

    def make_bias(self, inputs: PagedInputs) -> Tensor | None:
        """`[G, 1 or Hq, L, S]` over all blocks; None if every row sees every gathered key."""
        num_keys, query_len = self.width * self.block_size, self.requests[0].query_len
        params = inputs.params
        spans = zip(self.ranges, self.offsets, strict=True)
        filled = all((start, end) == (offset, offset + num_keys) for (start, end), offset in spans)
        has_bias = params.alibi_slopes is not None or params.query_bias is not None
        if filled and query_len == 1 and not has_bias:
            return None
        facts = [(one.first_position, one.seq_len, bool(one.causal)) for one in self.requests]
        columns = zip(*facts, strict=True)
        first, ends, causal = (torch.tensor(each, device="cpu") for each in columns)
        positions = first[:, None] + torch.arange(query_len, device="cpu")
        offsets = torch.tensor(self.offsets, device="cpu")
        keys = offsets[:, None] + torch.arange(num_keys, device="cpu")
        causal, ends = causal[:, None, None], ends[:, None, None]
        visible = visible_keys(positions, keys, causal, params) & (keys.unsqueeze(1) < ends)
        query_bias = params.query_bias
        if query_bias is not None:
            query_bias = self._bias_over_keys(query_bias, num_keys)
        dtype = score_dtype(inputs.query)
        return score_bias(positions, keys, visible, params, query_bias, dtype)

    def _bias_over_keys(self, query_bias: Tensor, num_keys: int) -> Tensor:
        """`query_bias` in the columns of each request's query span, 0 elsewhere: `[G, L, S]`."""
        shape = len(self.requests), self.requests[0].query_len, num_keys
        result = query_bias.new_zeros(shape)
        for member, (request, offset) in enumerate(zip(self.requests, self.offsets, strict=True)):
            begin = max(request.first_position, offset)
            columns = slice(begin - request.first_position, request.query_len)
            keys = slice(begin - offset, request.seq_len - offset)
            result[member, :, keys] = query_bias[request.rows, columns]
        return result
