"""Shared prefixes in CUDA graphs: tensors of fixed capacity and fixed addresses.

A captured graph contains the launches of the suffixes, of `captured_parts` parts of prefixes, and
of the merge. They read the tensors of this module, which every batch fills: parts that a batch does
not use have no rows, and requests without a prefix have all their keys in the suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from attnlib.backends.cascade.part_rows import PartRows
from attnlib.backends.cascade.schedule import PrefixPart, PrefixRule
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.shared_prefix import SharedPrefix
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = ["CapturedPrefixes", "fitting_parts"]


def fitting_parts(
    prefixes: Sequence[SharedPrefix],
    query_lens: Sequence[int],
    max_parts: int,
    max_rows: int,
    rule: PrefixRule,
    block_size: int,
) -> tuple[list[SharedPrefix], list[PrefixPart]]:
    """The prefixes that fit the capacity of a graph, and their parts: all query rows with some of
    the tokens. Prefixes at the end of the list, which continue others, are left out first.

    Args:
        prefixes: of the batch, each after the one that it continues.
        query_lens: new tokens of each request.
        max_parts: parts of the graph.
        max_rows: query rows of all parts together.
        rule: the shortest part.
        block_size: N.
    """
    kept = list(prefixes)
    while kept:
        rows = sum(query_lens[r] for prefix in kept for r in prefix.requests)
        if rows <= max_rows and len(kept) <= max_parts:
            break
        kept.pop()
    if not kept:
        return [], []
    most = max(1, min(max_rows // max(1, rows), max_parts // len(kept)))
    parts = []
    for prefix in kept:
        tokens = prefix.end - prefix.start
        count = max(1, min(most, tokens // rule.min_part_tokens))
        size = -(-tokens // count // block_size) * block_size
        parts += [
            PrefixPart(prefix.requests, start, min(start + size, prefix.end))
            for start in range(prefix.start, prefix.end, size)
        ]
    return kept, parts


class CapturedPrefixes:
    """The tensors that graphs of one builder read.

    Args:
        spec: of the layers.
        device: of the batches.
        limits: the largest batch that is captured.
        rule: how many parts and query rows a graph has.

    Attributes:
        limits: of the builder of the prefixes.
    """

    def __init__(
        self, spec: AttentionSpec, device: torch.device, limits: BatchLimits, rule: PrefixRule
    ) -> None:
        self._block_size = spec.block_size
        reqs, tokens = limits.max_num_reqs, limits.max_num_tokens
        columns = -(-limits.max_seq_len // spec.block_size)
        self.max_parts = rule.captured_parts
        rows = self.max_rows(tokens)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.limits = BatchLimits(
            max_num_reqs=self.max_parts, max_num_tokens=rows, max_seq_len=limits.max_seq_len
        )
        self._seq_lens, self._table = zeros(reqs), zeros(reqs, columns)
        self._part_starts, self._part_lens = zeros(self.max_parts + 1), zeros(self.max_parts)
        self._part_table = zeros(self.max_parts, columns)
        self._rows = zeros(rows, dtype=torch.int64)
        self._partial_starts, self._partial_rows = zeros(tokens + 1), zeros(rows)
        self._sources: set[int] = set()

    def max_rows(self, num_tokens: int) -> int:
        """Query rows of a graph of `num_tokens` tokens: each in a quarter of the parts."""
        return num_tokens * max(1, self.max_parts // 4)

    def add_source(self, common: CommonAttentionMetadata) -> None:
        """Note the tensors of a batch that is captured."""
        self._sources.add(common.seq_lens.data_ptr())

    def holds(self, common: CommonAttentionMetadata) -> bool:
        """Whether a batch is in the tensors of one that was captured."""
        return common.seq_lens.data_ptr() in self._sources

    def fill(
        self,
        common: CommonAttentionMetadata,
        covered: Sequence[int],
        parts: Sequence[PrefixPart],
        query_lens: Sequence[int],
    ) -> tuple[CommonAttentionMetadata, CommonAttentionMetadata, tuple[torch.Tensor, ...]]:
        """Fill the tensors for a batch.

        Args:
            common: the batch, padded to the size of its graph.
            covered: tokens of each request that its prefixes cover.
            parts: of the prefixes; at most `max_parts`.
            query_lens: new tokens of each request.

        Returns:
            (suffixes, parts as a batch, (query rows of the parts, starts and rows of the partial
            results of each token)).
        """
        starts = list(accumulate(query_lens, initial=0))
        found = PartRows.of(parts, starts, common.num_actual_tokens)
        suffix = self._fill_suffixes(common, covered)
        batch = self._fill_parts(common, parts, found.part_starts)
        most, tokens = batch.num_actual_tokens, common.num_actual_tokens
        _copy(self._rows[:most], found.rows + [0] * (most - len(found.rows)))
        _copy(self._partial_starts, found.partial_starts)
        _copy(self._partial_rows, found.partial_rows)
        partial = self._rows[:most], self._partial_starts[: tokens + 1], self._partial_rows[:most]
        return suffix, batch, partial

    def _fill_suffixes(
        self, common: CommonAttentionMetadata, covered: Sequence[int]
    ) -> CommonAttentionMetadata:
        """Fill the lengths and tables of the suffixes."""
        table = common.block_table_tensor
        assert table is not None
        reqs, width = common.num_reqs, table.shape[1]
        shift = torch.tensor(covered, dtype=torch.int32, device="cpu").to(
            table.device, non_blocking=True
        )
        seq_lens = self._seq_lens[:reqs]
        torch.sub(common.seq_lens, shift, out=seq_lens)
        columns = _columns(shift // self._block_size, width)
        self._table[:reqs, :width].copy_(table.gather(1, columns))
        return common.replace(
            seq_lens=seq_lens,
            seq_lens_cpu=None,
            num_computed_tokens_cpu=None,
            block_table_tensor=self._table[:reqs, :width],
            shared_prefixes=None,
        )

    def _fill_parts(
        self,
        common: CommonAttentionMetadata,
        parts: Sequence[PrefixPart],
        part_starts: list[int],
    ) -> CommonAttentionMetadata:
        """Fill the lengths and tables of the parts, which are a batch of `max_parts` requests."""
        table = common.block_table_tensor
        assert table is not None
        width, missing = table.shape[1], self.max_parts - len(parts)
        _copy(self._part_starts, part_starts + part_starts[-1:] * missing)
        _copy(self._part_lens, [part.end - part.start for part in parts] + [0] * missing)
        if parts:
            first = torch.tensor([part.requests[0] for part in parts], device=table.device)
            begin = [part.start // self._block_size for part in parts]
            columns = _columns(torch.tensor(begin, device=table.device), width)
            self._part_table[: len(parts), :width].copy_(table[first].gather(1, columns))
        return CommonAttentionMetadata(
            query_start_loc=self._part_starts,
            seq_lens=self._part_lens,
            num_reqs=self.max_parts,
            num_actual_tokens=self.max_rows(common.num_actual_tokens),
            max_query_len=common.num_actual_tokens,
            max_seq_len=self.limits.max_seq_len,
            block_table_tensor=self._part_table[:, :width],
            causal=False,
        )


def _copy(target: torch.Tensor, values: Sequence[int]) -> None:
    """Copy integers to the beginning of a tensor."""
    own = target[: len(values)]
    own.copy_(torch.tensor(values, dtype=target.dtype, device="cpu"), non_blocking=True)


def _columns(first: torch.Tensor, width: int) -> torch.Tensor:
    """`[rows, width]` columns of a block table from `first` on, at most the last one."""
    columns = torch.arange(width, device=first.device) + first.unsqueeze(1)
    return columns.clamp_(max=width - 1)
