"""The requests of a batch, the mask, and the key tiles that queries visit.

Each warp partition computes these on the device for itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate

__all__ = [
    "Batch",
    "KeyTiles",
    "Mask",
    "VisitedTiles",
]


@aggregate
class Mask:
    """Which keys a query sees: causality, a window and chunks (M1, M2).

    Fields:
        left, right: sides of the window.
        chunk: positions of a chunk.
        CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK: which of them apply.
    """

    left: Value
    right: Value
    chunk: Value
    CAUSAL: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_CHUNK: gl.constexpr

    @gluon.jit
    def span(self, position, seq_len):
        """Return [first, last) of the keys visible to a query at `position`.

        The span is empty when last <= first.
        """
        # Derived from `position`, so that both have its shape and layout.
        first = position * 0
        last = first + seq_len
        if self.CAUSAL:
            last = gl.minimum(last, position + 1)
        if self.HAS_LEFT:
            first = gl.maximum(first, position - self.left)
        if self.HAS_RIGHT:
            last = gl.minimum(last, position + self.right + 1)
        if self.HAS_CHUNK:
            # Positions before 0 belong to padding rows, which see nothing.
            begin = gl.maximum(position, 0) // self.chunk * self.chunk
            first = gl.maximum(first, begin)
            last = gl.where(position < 0, 0, gl.minimum(last, begin + self.chunk))
        return first, last


@aggregate
class Batch:
    """The requests of a batch.

    Fields:
        query_start_loc: int32 [num_reqs + 1], the first query row of each request and the end; None
            if every request has one query.
        seq_lens: int32 [num_reqs].
        block_table: int32 [num_reqs, pages].
        num_reqs: number of requests.
        num_blocks: blocks of the cache.
        stride_table: elements between the rows of `block_table`.
    """

    query_start_loc: Value
    seq_lens: Value
    block_table: Value
    num_reqs: Value
    num_blocks: Value
    stride_table: Value

    @gluon.jit
    def lengths(self, request, mask):
        """Return (first query row, query length, sequence length) of a request or of a vector of
        them. The query length is 0 outside of `mask`."""
        if self.query_start_loc is None:
            start = request
            seq_len = gl.load(self.seq_lens + request, mask=mask, other=-1)
            query_len = (seq_len >= 0).to(gl.int32)
        else:
            start = gl.load(self.query_start_loc + request, mask=mask, other=0)
            query_len = gl.load(self.query_start_loc + request + 1, mask=mask, other=0) - start
            seq_len = gl.load(self.seq_lens + request, mask=mask, other=0)
        return start, query_len, seq_len

    @gluon.jit
    def table(self, request):
        """Return a pointer to the blocks of a request."""
        return self.block_table + request.to(gl.int64) * self.stride_table

    @gluon.jit
    def num_rows(self):
        """Return the query rows of all requests."""
        if self.query_start_loc is None:
            num_rows = self.num_reqs
        else:
            num_rows = gl.load(self.query_start_loc + self.num_reqs)
        return num_rows


@aggregate
class VisitedTiles:
    """The key tiles [begin, end) that a query tile visits.

    Tiles [left_end, right_begin) are entirely visible to every row and need no mask; where a score
    function has BOUNDS, it changes no score in them either. The fields never decrease in the order
    begin, left_end, right_begin, end.
    """

    begin: Value
    left_end: Value
    right_begin: Value
    end: Value

    @gluon.jit
    def needs_mask(self, tile):
        """Return whether some row does not see some key of the tile."""
        return (tile >= self.right_begin) | (tile < self.left_end)


@aggregate
class KeyTiles:
    """The key tiles that the queries of a batch visit.

    Fields:
        batch: `Batch`.
        mask: `Mask`.
        aux: tensors of the score function, in a tuple.
        BOUNDS: function of the keys that the score function shows; None if it hides none.
        TILE_TOKENS: query tokens of a query tile.
        BLOCK_N: keys of a tile.
    """

    batch: Value
    mask: Value
    aux: Value
    BOUNDS: gl.constexpr
    TILE_TOKENS: gl.constexpr
    BLOCK_N: gl.constexpr

    @gluon.jit
    def visited(self, first_token, query_len, seq_len, request):
        """Return the `VisitedTiles` of the query tile that begins at `first_token`."""
        # Both ends of a row's span never decrease from row to row, so the first and the last row of
        # the tile bound them.
        last_token = gl.minimum(first_token + self.TILE_TOKENS, query_len) - 1
        shift = seq_len - query_len
        first_low, last_low = self.mask.span(first_token + shift, seq_len)
        first_high, last_high = self.mask.span(last_token + shift, seq_len)
        if self.BOUNDS is not None:
            low, high, same_low, same_high = self.BOUNDS(
                first_token + shift, last_token + shift, seq_len, request, self.aux
            )
            first_low = gl.maximum(first_low, low)
            last_high = gl.minimum(last_high, high)
            first_high = gl.maximum(first_high, same_low)
            last_low = gl.minimum(last_low, same_high)
        begin = gl.maximum(first_low, 0) // self.BLOCK_N
        end = gl.maximum((gl.maximum(last_high, 0) + self.BLOCK_N - 1) // self.BLOCK_N, begin)
        right_begin = gl.minimum(gl.maximum(gl.maximum(last_low, 0) // self.BLOCK_N, begin), end)
        left_end = begin
        if self.mask.HAS_LEFT or self.mask.HAS_CHUNK or self.BOUNDS is not None:
            first_full = (gl.maximum(first_high, 0) + self.BLOCK_N - 1) // self.BLOCK_N
            left_end = gl.minimum(gl.maximum(first_full, begin), right_begin)
        return VisitedTiles(begin, left_end, right_begin, end)

    @gluon.jit
    def count(self, request, mask):
        """Return how many tiles a request visits, for one request or a vector of requests.

        At least 1 if the request has queries, so that its output is written; 0 if it has none, or
        outside of `mask`.
        """
        _, query_len, seq_len = self.batch.lengths(request, mask)
        first, _ = self.mask.span(seq_len - query_len, seq_len)
        _, last = self.mask.span(seq_len - 1, seq_len)
        if self.BOUNDS is not None:
            low, high, _, _ = self.BOUNDS(
                seq_len - query_len, seq_len - 1, seq_len, request, self.aux
            )
            first = gl.maximum(first, low)
            last = gl.minimum(last, high)
        end = (gl.maximum(last, 0) + self.BLOCK_N - 1) // self.BLOCK_N
        tiles = end - gl.maximum(first, 0) // self.BLOCK_N
        return gl.where(query_len > 0, gl.maximum(tiles, 1), 0)
