"""The consumers of the decode of shared prefixes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    launch_dependent_grids,
    partition_barrier,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_call import Queries
from attnlib.ops.triton.hopper.kernels.decode_queries import prefetch_queries, query_layout
from attnlib.ops.triton.hopper.kernels.shared_products import (
    ConsumerTiles,
    multiply_item,
    multiply_tile,
    output_layout,
    score_layout,
)
from attnlib.ops.triton.hopper.kernels.shared_sums import ROWS, RowSums
from attnlib.ops.triton.hopper.kernels.softmax import score_factor

__all__ = [
    "SharedDecodeCall",
    "shared_consumer",
]


@aggregate
class SharedDecodeCall:
    """What the consumers share.

    Fields:
        query, num_rows, stride_qt, stride_qh: `queries`.
        schedule: `Schedule`.
        partial_out, partial_lse: float32 partial results, [P, Hq, DV] and [P, Hq].
        scale, soft_cap: of the softmax.
        keys, values: `Ring` of each.
        exchange: `Exchange`.
        config: `SharedDecodeConfig`.
    """

    query: Value
    schedule: Value
    partial_out: Value
    partial_lse: Value
    scale: Value
    soft_cap: Value
    num_rows: Value
    stride_qt: Value
    stride_qh: Value
    keys: Value
    values: Value
    exchange: Value
    config: Value

    @gluon.jit
    def queries(self):
        """Return the `Queries`."""
        return Queries(self.query, self.stride_qt, self.stride_qh, self.num_rows)


@gluon.jit
def _prepare_queries(call, q_tile, item, offset, kv_head):
    """Bring the query rows of a work item, from member `offset` on, to shared memory."""
    config: gl.constexpr = call.config
    GROUP: gl.constexpr = config.GROUP
    WIDTH: gl.constexpr = config.WIDTH
    LAYOUT: gl.constexpr = query_layout(WIDTH, 4)
    queries = call.queries()
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    member = offset + row // GROUP
    valid = (row < ROWS // GROUP * GROUP) & (member < item.num_tokens)
    token = gl.load(
        call.schedule.tokens + item.first + member, mask=valid & (item.consecutive == 0), other=0
    )
    token = gl.where(item.consecutive != 0, item.first_token + member, token)
    offsets = token.to(gl.int64) * queries.stride_token
    offsets += (kv_head * GROUP + row % GROUP).to(gl.int64) * queries.stride_head
    # The launcher checks 16-byte alignment; the shifts tell the compiler.
    offsets = (offsets >> 3) << 3
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    rows = gl.load(
        queries.pointer + offsets[:, None] + columns[None, :],
        mask=valid[:, None] & (columns < config.D)[None, :],
        other=0.0,
    )
    # All warps are done with the previous split's queries before they are overwritten.
    partition_barrier()
    q_tile.store(rows)
    fence_async_shared()
    partition_barrier()


@gluon.jit
def _no_sums(config):
    """Return `RowSums` of no keys."""
    WIDTH: gl.constexpr = config.WIDTH_V
    ROW: gl.constexpr = gl.SliceLayout(1, score_layout(config.BLOCK_N))
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.full([ROWS], 0.0, gl.float32, ROW)
    return RowSums(row_max, row_sum, gl.zeros([ROWS, WIDTH], gl.float32, output_layout(WIDTH)))


@gluon.jit
def _multiply_in_turn(
    tiles, item, segment, sums, position, step, count, offset, WARPGROUP: gl.constexpr, config
):
    """Multiply by every second tile of a split, and release the others.

    Args:
        offset: member of the first query row.

    Returns:
        (`RowSums`, the `SeenSegment` of the last tile).
    """
    for i in range(0, count):
        if i % 2 != WARPGROUP:
            tiles.skip(step + i)
        else:
            tile = position + i
            segment = segment.at(tile)
            past_end = segment.keys - (tile - segment.begin) * config.BLOCK_N
            # TMA fills whole pages past the end with zeros, but not the rest of the last page.
            # Prefixes, which more rows see, are whole pages.
            clear = gl.where(segment.keys % config.BLOCK_SIZE != 0, past_end, config.BLOCK_N)
            masked = (past_end < config.BLOCK_N) | (segment.seeing < item.num_tokens)
            sums = multiply_tile(tiles, sums, step + i, segment, offset, masked, past_end, clear)
    return sums, segment


@gluon.jit
def _store_partials(call, sums, item, valid, offset, partial, kv_head):
    """Write the partial results of the query rows of a consumer.

    Args:
        valid: rows that exist.
        offset: member of the first row.
        partial: index of the partial result of the first member.
    """
    config: gl.constexpr = call.config
    GROUP: gl.constexpr = config.GROUP
    WIDTH: gl.constexpr = config.WIDTH_V
    DV: gl.constexpr = config.DV
    O_LAYOUT: gl.constexpr = output_layout(WIDTH)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    HEADS: gl.constexpr = config.NUM_KV_HEADS * GROUP
    row = gl.arange(0, ROWS, gl.SliceLayout(1, score_layout(config.BLOCK_N)))
    member = offset + row // GROUP
    row_sum = sums.row_sum
    empty = row_sum == 0.0
    safe_sum = gl.where(empty, 1.0, row_sum)
    base2 = gl.where(empty, float("-inf"), sums.row_max + gl.log2(safe_sum))
    head = kv_head * GROUP + row % GROUP
    entry = member * HEADS + head
    first_entry = partial.to(gl.int64) * HEADS
    gl.store(call.partial_lse + first_entry + entry, base2, mask=valid)
    normalizer = gl.convert_layout(1.0 / safe_sum, O_ROW)
    entry = gl.convert_layout(entry, O_ROW)
    # The merge does not use rows without a key.
    valid = gl.convert_layout(valid & (row_sum != 0.0), O_ROW)
    lanes = gl.arange(0, WIDTH, gl.SliceLayout(0, O_LAYOUT))
    gl.store(
        call.partial_out + first_entry * DV + ((entry * DV)[:, None] + lanes[None, :]),
        sums.acc * normalizer[:, None],
        mask=valid[:, None] & (lanes < DV)[None, :],
    )


@gluon.jit
def shared_consumer(call, q_tile, WARPGROUP: gl.constexpr):
    """Multiply, and write the partial results of one consumer warpgroup."""
    config: gl.constexpr = call.config
    GROUP: gl.constexpr = config.GROUP
    BLOCK_N: gl.constexpr = config.BLOCK_N
    TOKENS: gl.constexpr = ROWS // GROUP
    factor = score_factor(call.scale, call.soft_cap, config.HAS_CAP)
    tiles = ConsumerTiles(
        q_tile, call.keys, call.values, factor, call.soft_cap, config.HAS_CAP, GROUP
    )
    # PDL: the merge may start; it waits for this kernel's results by itself.
    launch_dependent_grids()
    own = call.schedule.own_range(config.NUM_KV_HEADS)
    position = own.begin
    step = 0
    given = 0
    item = call.schedule.item(own.item)
    segment = call.schedule.seen_segment(own.segment)
    # The previous kernel may have written the queries.
    wait_on_dependent_grids()
    while position < own.end:
        # Items may be short: the fields of the next one are loaded before they are needed.
        following = item.following()
        count = gl.minimum(item.begin + item.tiles, own.end) - position
        split = own.index - item.first_range
        # Both consumers compute all tiles of an item of many rows, for different rows. With fewer
        # rows, each computes every second tile.
        in_turn = item.num_tokens <= TOKENS
        offset = gl.where(in_turn, 0, WARPGROUP * TOKENS)
        computed = gl.where(in_turn, (count + 1 - WARPGROUP) // 2, count)
        partial = split * item.num_tokens + item.partial_begin
        sums = _no_sums(call.config)
        if computed > 0:
            _prepare_queries(call, q_tile, item, offset, own.kv_head)
            if (position + count < own.end) & (following.consecutive != 0):
                prefetch_queries(
                    call.queries(), following.first_token, own.kv_head, GROUP, config.D, ROWS
                )
        if in_turn:
            sums, segment = _multiply_in_turn(
                tiles, item, segment, sums, position, step, count, offset, WARPGROUP, call.config
            )
        else:
            segment = segment.at(position)
            keys = segment.keys - (position - segment.begin) * BLOCK_N
            sums = multiply_item(tiles, sums, step, count, keys)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, score_layout(BLOCK_N)))
        member = offset + row // GROUP
        valid = (row < TOKENS * GROUP) & (member < item.num_tokens)
        if in_turn:
            if WARPGROUP == 1:
                call.exchange.give(sums, given)
                valid = row < 0
            else:
                sums = call.exchange.add(sums, given)
            given += 1
        _store_partials(call, sums, item, valid, offset, partial, own.kv_head)
        position += count
        step += count
        item = following
