"""The query rows of a CTA that decodes over latents: their queries, LSEs and places."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.softmax import add_sink

__all__ = [
    "QueryRows",
    "clear_rows",
    "copy_queries",
    "normalizers",
    "query_offsets",
    "query_rows",
]


@aggregate
class QueryRows:
    """The query rows of a CTA: GROUP heads of each token.

    Fields:
        row: [rows], their numbers.
        token: [rows], their tokens in the request.
        head: [rows], their query heads.
        config: the `LatentConfig`.
    """

    row: Value
    token: Value
    head: Value
    config: Value

    @gluon.jit
    def exist(self, query_len):
        """Return which rows exist in a request."""
        ROWS: gl.constexpr = self.config.TILE_TOKENS * self.config.GROUP
        return (self.row < ROWS) & (self.token < query_len)

    @gluon.jit
    def header(self, place):
        """Return what tells the combine kernel how many splits the request of a row has and where
        its first partial result is; `place` is that of its first split."""
        first_row = self.row // self.config.GROUP * self.config.GROUP
        return (place.partial_index << 15) | (first_row << 9) | place.num_splits

    @gluon.jit
    def partial_offsets(self, partials, place):
        """Return the element offsets of the rows in the partial result of a split."""
        return (place.partial_index * partials.rows + self.row).to(gl.int64) * self.config.DV


@gluon.jit
def query_rows(row, block, config):
    """Return the `QueryRows` with these numbers of a block. The blocks of heads of the first block
    of tokens come first."""
    token = row // config.GROUP
    head_block = block
    if config.MANY_TOKENS:
        token += block // config.HEAD_BLOCKS * config.TILE_TOKENS
        head_block = block % config.HEAD_BLOCKS
    head = head_block * config.GROUP + row % config.GROUP
    return QueryRows(row, token, head, config)


@gluon.jit
def query_offsets(queries, rows, start):
    """Return the element offsets of `QueryRows` in the `Queries`.

    Args:
        start: first query row of the request.
    """
    offsets = (start + rows.token).to(gl.int64) * queries.stride_token
    offsets += rows.head.to(gl.int64) * queries.stride_head
    # The launcher checks 16-byte alignment; the shifts tell the compiler.
    return (offsets >> 3) << 3


@gluon.jit
def copy_queries(target, queries, offsets, valid, START: gl.constexpr):
    """Copy the elements of the queries from START on to a tile in shared memory.

    Args:
        offsets, valid: of the rows, in any layout.
    """
    ROWS: gl.constexpr = target.shape[0]
    WIDTH: gl.constexpr = target.shape[1]
    LANES: gl.constexpr = min(32, WIDTH // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = START + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    starts = gl.convert_layout(offsets, gl.SliceLayout(1, layout))
    mask = gl.convert_layout(valid.to(gl.int32), gl.SliceLayout(1, layout)) != 0
    content = gl.load(
        queries.pointer + starts[:, None] + columns[None, :],
        mask=mask[:, None] & (rows[:, None] < ROWS),
        other=0.0,
    )
    target.store(content)


@gluon.jit
def normalizers(
    row_max, row_sum, rows, valid, split, place, outputs, partials, STORE: gl.constexpr
):
    """Return the factors of a split's accumulators.

    Args:
        row_max, row_sum: [rows], base-2 maxima and sums of the weights.
        valid: [rows], which rows exist.
        place: the `SplitPlace` of the split.
        outputs, partials: the `Outputs` and the `Partials`.
        STORE: write the LSEs, too: to the output if it is the only split of its request, else
            base-2 LSEs to the partial results.
    """
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    factor = gl.full([row_max.shape[0]], 1.0, gl.float32, row_max.type.layout)
    if rows.config.HAS_SINK:
        if place.num_splits == 1:
            # Otherwise the sink counts when the splits are combined (M4).
            finite_max, factor, row_sum = add_sink(
                row_max, row_sum, gl.load(outputs.sinks + rows.head, mask=valid, other=0.0)
            )
    empty = row_sum == 0.0
    safe_sum = gl.where(empty, 1.0, row_sum)
    if STORE:
        base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
        if place.num_splits == 1:
            if rows.config.HAS_LSE:
                outputs.store_lses(split.start + rows.token, rows.head, base2, valid)
        else:
            rows_before = place.partial_index * partials.rows
            gl.store(partials.lses + rows_before + rows.row, base2, mask=valid)
    return factor / safe_sum


@gluon.jit
def clear_rows(outputs, batch, num_tokens, block, CONFIG: gl.constexpr):
    """Set the rows of a block after the last request to 0 and their LSEs to -inf (M6). One
    warpgroup.

    Args:
        num_tokens: tokens of the output.
        block: of query rows, counted from the end of the last request.
        CONFIG: the `LatentConfig`.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    ROWS: gl.constexpr = CONFIG.ROWS
    DV: gl.constexpr = CONFIG.DV
    rows = query_rows(gl.arange(0, ROWS, ROW), block, CONFIG)
    start = batch.num_rows()
    valid = rows.exist(num_tokens - start)
    lanes = gl.arange(0, DV, gl.SliceLayout(0, LAYOUT))
    zeros = gl.zeros([ROWS, DV], outputs.pointer.dtype.element_ty, LAYOUT)
    offsets = outputs.offsets(start + rows.token, rows.head)
    mask = valid[:, None] & (lanes >= 0)[None, :]
    gl.store(outputs.pointer + offsets[:, None] + lanes[None, :], zeros, mask=mask)
    if CONFIG.HAS_LSE:
        empty = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        outputs.store_lses(start + rows.token, rows.head, empty, valid)
