"""The batches of a cascade: parts of shared prefixes and suffixes, or the items of one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from attnlib.backends.cascade.part_rows import PartRows
from attnlib.backends.cascade.schedule import PrefixPart, decode_segments
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.shared_prefix import SharedPrefix
from attnlib.ops.shared_decode import DecodeItems
from attnlib.ops.shared_decode_schedule import schedule_items
from attnlib.spec import AttentionSpec

__all__ = ["PrefixBatch", "decode_items", "prefix_batch", "suffix_batch"]


@dataclass(frozen=True, eq=False)
class PrefixBatch:
    """The parts of all shared prefixes as one batch, which every row of a part sees completely.

    P rows: each query row once for each part of its prefixes.

    Attributes:
        metadata: of the prefix backend, for a batch with one request for each part.
        query_rows: [P] int64 device, the row of the batch's queries that each row repeats; None if
            the rows are the first P rows of the batch.
        num_rows: P.
        partial_starts: [T + 1] int32 device; token t has entries `[starts[t], starts[t + 1])`.
        partial_rows: [P] int32 device, rows of this batch, grouped by token.
    """

    metadata: AttentionMetadata
    query_rows: torch.Tensor | None
    num_rows: int
    partial_starts: torch.Tensor
    partial_rows: torch.Tensor


def prefix_batch(
    common: CommonAttentionMetadata,
    parts: Sequence[PrefixPart],
    builder: AttentionMetadataBuilder[Any],
) -> PrefixBatch:
    """The parts as a batch of the prefix backend. One copy takes all indices to the device.

    Args:
        common: the batch.
        parts: of its prefixes.
        builder: of the prefix backend.
    """
    assert common.query_start_loc_cpu is not None and common.block_table_tensor is not None
    starts = common.query_start_loc_cpu.tolist()
    found = PartRows.of(parts, starts, starts[-1])
    part_starts, block = found.part_starts, builder.spec.block_size
    host = {
        "rows": found.rows,
        "starts": part_starts,
        "lengths": [part.end - part.start for part in parts],
        "first": [part.requests[0] for part in parts],
        "column": [part.start // block for part in parts],
        "partial_starts": found.partial_starts,
        "partial_rows": found.partial_rows,
    }
    num_rows = len(found.rows)
    device = _to_device(host, common.query_start_loc.device)
    longest = max(host["lengths"])
    columns = torch.arange(longest // block, device=device["column"].device)
    table = common.block_table_tensor
    last = table.shape[1] - 1
    columns = (device["column"].unsqueeze(1) + columns).clamp(max=last)
    batch = CommonAttentionMetadata(
        query_start_loc=device["starts"],
        query_start_loc_cpu=torch.tensor(part_starts, dtype=torch.int32, device="cpu"),
        seq_lens=device["lengths"],
        seq_lens_cpu=torch.tensor(host["lengths"], dtype=torch.int32, device="cpu"),
        num_reqs=len(parts),
        num_actual_tokens=num_rows,
        max_query_len=max(b - a for a, b in pairwise(part_starts)),
        max_seq_len=longest,
        block_table_tensor=table[device["first"].long().unsqueeze(1), columns.long()],
        causal=False,
    )
    return PrefixBatch(
        metadata=builder.build(0, batch),
        query_rows=None if found.rows == list(range(num_rows)) else device["rows"].long(),
        num_rows=num_rows,
        partial_starts=device["partial_starts"],
        partial_rows=device["partial_rows"],
    )


def _to_device(host: dict[str, list[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """Lists of integers as int32 tensors on the device, by one copy.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel again for other addresses.
    """
    values: list[int] = []
    sizes: list[int] = []
    for numbers in host.values():
        padding = -len(numbers) % 4
        values += [*numbers, *[0] * padding]
        sizes += [len(numbers), padding]
    packed = torch.tensor(values, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
    return dict(zip(host, torch.split(packed, sizes)[::2], strict=True))


def suffix_batch(
    common: CommonAttentionMetadata, covered: list[int], spec: AttentionSpec
) -> CommonAttentionMetadata:
    """The batch without the first `covered` tokens of each request.

    Its queries keep their distance to the keys, because M1 counts positions from the end.
    """
    assert common.block_table_tensor is not None and common.seq_lens_cpu is not None
    table, block = common.block_table_tensor, spec.block_size
    if min(covered) == max(covered):  # the shared blocks are the same columns: a view suffices
        shifted: Any = covered[0]
        table = table[:, shifted // block :]
        lengths_cpu = common.seq_lens_cpu - shifted
    else:
        skipped = torch.tensor(covered, dtype=torch.int32, device="cpu")
        lengths_cpu = common.seq_lens_cpu - skipped
        shifted = skipped.to(table.device, non_blocking=True)
        columns = torch.arange(table.shape[1] - min(covered) // block, device=table.device)
        columns = (columns + (shifted // block).unsqueeze(1)).clamp(max=table.shape[1] - 1)
        table = table.gather(1, columns.long())
    computed = common.num_computed_tokens_cpu
    return common.replace(
        seq_lens=common.seq_lens - shifted,
        seq_lens_cpu=lengths_cpu,
        num_computed_tokens_cpu=None if computed is None else lengths_cpu - common.query_lens_cpu,
        max_seq_len=max(0, common.max_seq_len - min(covered)),
        block_table_tensor=table,
        shared_prefixes=None,
    )


def decode_items(
    common: CommonAttentionMetadata,
    prefixes: Sequence[SharedPrefix],
    spec: AttentionSpec,
    shape: tuple[int, int],
) -> DecodeItems:
    """The items of a decode whose prefixes and suffixes one kernel computes.

    Args:
        common: the batch.
        prefixes: those that are computed once.
        spec: of the layers.
        shape: keys of a tile and ranges (`AttentionMetadataBuilder.shared_decode_shape`).
    """
    assert common.query_start_loc_cpu is not None and common.seq_lens_cpu is not None
    starts = common.query_start_loc_cpu.tolist()
    segments = decode_segments(prefixes, starts, common.seq_lens_cpu.tolist(), spec)
    lists = schedule_items(segments, starts[-1], spec.group_size, spec.block_size, *shape)
    return lists.to_device(common.query_start_loc.device)
