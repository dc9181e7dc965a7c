"""The tensors of one paged call, and how one request's part is cut out of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlib.ops.torch.batch import Request
from attnlib.ops.torch.gather import request_positions
from attnlib.ops.torch.invariant import attend_rows_invariant
from attnlib.ops.torch.mask import key_range
from attnlib.ops.torch.request import KeySpan, QueryRows, attend_rows
from attnlib.ops.torch.rules import ScoreRules

__all__ = ["PagedInputs", "attend_paged", "visible_range"]


@dataclass(frozen=True)
class PagedInputs:
    """What a paged call reads; the factors are those of stored values, as `quant.head_factor` returns them."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_bias: Tensor | None
    k_factor: float | Tensor
    v_factor: float | Tensor

    def rows(self, request: Request) -> QueryRows:
        """The request's query rows; of the bias, the columns of its own query span."""
        bias = (
            None if self.query_bias is None else self.query_bias[request.rows, : request.query_len]
        )
        first = request.first_position
        return QueryRows(
            self.query[request.rows], first, request.seq_len, first, request.causal, bias
        )

    def blocks(self, request: Request, rules: ScoreRules) -> Tensor:
        """Ids of the pages that hold a position which some row of the request may see."""
        start, end = visible_range(request, rules)
        block_size = self.key_cache.shape[1]
        return self.block_table[request.index, start // block_size : -(-end // block_size)]

    def span(self, request: Request, rules: ScoreRules) -> KeySpan:
        """The keys and values that any row of the request may see, and no others."""
        start, end = visible_range(request, rules)
        table_row = self.block_table[request.index]
        key = request_positions(self.key_cache, table_row, start, end)
        value = request_positions(self.value_cache, table_row, start, end)
        return KeySpan(key, value, start, self.k_factor, self.v_factor)


def visible_range(request: Request, rules: ScoreRules) -> tuple[int, int]:
    """Half-open range of the keys that some row of the request may see; (n, n) when there is none."""
    last = request.seq_len - 1
    start, end = key_range(request.first_position, last, request.seq_len, request.causal, rules)
    return start, max(start, end)


def attend_paged(
    requests: list[Request],
    inputs: PagedInputs,
    rules: ScoreRules,
    out: Tensor,
    lse: Tensor | None,
    batch_invariant: bool = False,
) -> None:
    """Attend for the given requests, one after the other; rows of other requests are left alone."""
    attend = attend_rows_invariant if batch_invariant else attend_rows
    for request in requests:
        part_lse = None if lse is None else lse[request.rows]
        attend(
            inputs.rows(request), inputs.span(request, rules), rules, out[request.rows], part_lse
        )
