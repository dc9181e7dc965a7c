"""The inputs of one paged operation, and the slices of them that belong to one request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.batch import Request
from attnlib.ops.torch.gather import request_positions
from attnlib.ops.torch.invariant import attend_rows_invariant
from attnlib.ops.torch.mask import key_range
from attnlib.ops.torch.quant import head_factor
from attnlib.ops.torch.request import KeySpan, QueryRows, attend_rows

__all__ = ["PagedInputs", "attend_paged", "visible_range"]


@dataclass(frozen=True)
class PagedInputs:
    """The tensors and parameters that a paged operation reads; shapes as in `paged_prefill`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    params: AttentionParams

    @cached_property
    def k_factor(self) -> float | Tensor:
        """The factor of stored keys, as `quant.head_factor` returns it."""
        return head_factor(self.params.k_scale)

    @cached_property
    def v_factor(self) -> float | Tensor:
        """The factor of stored values, as `quant.head_factor` returns it."""
        return head_factor(self.params.v_scale)

    def rows(self, request: Request) -> QueryRows:
        """The request's query rows; of the bias, the columns of its own query span."""
        bias = self.params.query_bias
        if bias is not None:
            bias = bias[request.rows, : request.query_len]
        first, query = request.first_position, self.query[request.rows]
        return QueryRows(query, first, request.seq_len, first, request.causal, bias, request.index)

    def blocks(self, request: Request) -> Tensor:
        """Ids of the blocks that hold a position visible to some row of the request."""
        start, end = visible_range(request, self.params)
        block_size = self.key_cache.shape[1]
        return self.block_table[request.index, start // block_size : -(-end // block_size)]

    def span(self, request: Request) -> KeySpan:
        """The keys and values visible to some row of the request, and no others."""
        start, end = visible_range(request, self.params)
        table_row = self.block_table[request.index]
        key = request_positions(self.key_cache, table_row, start, end)
        value = request_positions(self.value_cache, table_row, start, end)
        return KeySpan(key, value, start, self.k_factor, self.v_factor)


def visible_range(request: Request, params: AttentionParams) -> tuple[int, int]:
    """Half-open range of the keys visible to some row of the request; (n, n) when there is none."""
    last = request.seq_len - 1
    start, end = key_range(request.first_position, last, request.seq_len, request.causal, params)
    return start, max(start, end)


def attend_paged(
    requests: list[Request],
    inputs: PagedInputs,
    out: Tensor,
    lse: Tensor | None,
    batch_invariant: bool = False,
) -> None:
    """Attend for the given requests one after the other; rows of other requests are not written."""
    attend = attend_rows_invariant if batch_invariant else attend_rows
    for request in requests:
        rows, span = inputs.rows(request), inputs.span(request)
        row_lse = None if lse is None else lse[request.rows]
        attend(rows, span, inputs.params, out[request.rows], row_lse)
