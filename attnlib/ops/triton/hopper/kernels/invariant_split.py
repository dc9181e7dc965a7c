"""Add the partial results of the batch-invariant decode (`invariant_decode.py`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import (
    exp2,
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.softmax import LN2, LOG2E

__all__ = ["invariant_split_kernel"]


@gluon.jit
def _divide(number, divisor, reciprocal):
    """Return number // divisor, in fewer instructions than an integer division."""
    quotient = (number.to(gl.float32) * reciprocal).to(gl.int32)
    rest = number - quotient * divisor
    quotient = gl.where(rest < 0, quotient - 1, quotient)
    return gl.where(rest >= divisor, quotient + 1, quotient)


@gluon.jit
def _maximum(left, right):
    return gl.maximum(left, right)


@gluon.jit
def _shared_value(memory, number: gl.constexpr):
    """Return an element of a vector in shared memory, to all lanes."""
    value = memory.slice(number, 1).load(gl.BlockedLayout([1], [32], [1], [0]))
    return gl.sum(value, 0)


@gluon.jit(
    do_not_specialize=[
        "num_reqs",
        "rows",
        "slots",
        "grid",
        "stride_ot",
        "stride_oh",
        "stride_lt",
    ],
    do_not_specialize_on_alignment=[
        "sinks",
        "lse",
        "query_start_loc",
        "split_headers",
        "partial_lses",
    ],
)
def invariant_split_kernel(
    partials,
    partial_lses,
    split_headers,
    query_start_loc,
    sinks,
    out,
    lse,
    num_reqs,
    rows,
    slots,
    grid,
    stride_ot,
    stride_oh,
    stride_lt,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DV: gl.constexpr,
    HEADS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STEP: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """Add the partial results of a row in the order of the line: COLUMNS of the values of HEADS
    query heads of a group, one after the other. One warp.

    Grid: (tokens, query heads / HEADS, blocks of COLUMNS). Rows after the last request become 0
    (M6).

    `split_headers` has for each token and KV head: the segments to be added, 0 if the output is
    written; the number of the first visited segment; the token's first row; the CTA that began the
    request; the position of the line that tile 0 has; the positions of a range; the tiles of a
    segment, and of the longest ones of the request.

    Each of the first STEP lanes has one segment of a round and computes its address and factors,
    which depend on the maxima only. Then all lanes add the values of one segment after the other.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    WIDE: gl.constexpr = gl.BlockedLayout([COLUMNS // 32], [32], [1], [0])
    # PDL: started early; nothing may be read before the decode kernel has ended.
    wait_on_dependent_grids()
    launch_dependent_grids()
    token = gl.program_id(0)
    first_head = gl.program_id(1) * HEADS
    columns = gl.program_id(2) * COLUMNS + gl.arange(0, COLUMNS, WIDE)
    inside = columns < DV
    kv_head = first_head // GROUP
    header = split_headers + (token * NUM_KV_HEADS + kv_head) * 8
    num_rows = gl.load(query_start_loc + num_reqs)
    rest = gl.load(header)
    first_segment = gl.load(header + 1)
    first_row = gl.load(header + 2)
    worker = gl.load(header + 3)
    line_end = gl.load(header + 4)
    per_range = gl.load(header + 5)
    tiles = gl.load(header + 6)
    most_tiles = gl.load(header + 7)
    if token >= num_rows:
        for head in range(first_head, first_head + HEADS):
            offset = token.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
            zeros = gl.zeros([COLUMNS], out.dtype.element_ty, WIDE)
            gl.store(out + offset + columns, zeros, mask=inside)
            if HAS_LSE:
                gl.store(lse + token.to(gl.int64) * stride_lt + head, float("-inf"))
    # With no segment, the decode kernel has written the output.
    heads = gl.where((token < num_rows) & (rest > 0), HEADS, 0)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    indices = gl.allocate_shared_memory(gl.int32, [STEP], VECTOR)
    olds = gl.allocate_shared_memory(gl.float32, [STEP], VECTOR)
    news = gl.allocate_shared_memory(gl.float32, [STEP], VECTOR)
    addends = gl.allocate_shared_memory(gl.float32, [STEP], VECTOR)
    reciprocal = 1.0 / per_range.to(gl.float32)
    maxima = partial_lses
    sums = partial_lses + grid * (slots + 1) * rows
    lane = gl.arange(0, STEP, LANES)
    for head in range(first_head, first_head + heads):
        row = first_row + head % GROUP
        output = out + token.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh + columns
        own = (worker * (slots + 1) + slots) * rows + row
        total = gl.load(partials + own * DV + columns, mask=inside, other=0.0)
        total_max = gl.load(maxima + own)
        total_sum = gl.load(sums + own)
        for base in range(0, rest, STEP):
            # The segment of a lane and the one that is added before it.
            slot = rest - 1 - base - lane
            live = slot >= 0
            # The range that has the segment's end, moved to the end of a longest one.
            end = ((first_segment + slot + 1) * tiles + most_tiles - 1) & -most_tiles
            owner = _divide(line_end - end, per_range, reciprocal)
            index = ((owner * NUM_KV_HEADS + kv_head) * (slots + 1) + slot) * rows + row
            end = ((first_segment + slot + 2) * tiles + most_tiles - 1) & -most_tiles
            owner = _divide(line_end - end, per_range, reciprocal)
            before = ((owner * NUM_KV_HEADS + kv_head) * (slots + 1) + slot + 1) * rows + row
            # Segments past the last one have no key and leave the sums unchanged.
            part_max = gl.load(maxima + index, mask=live, other=float("-inf"))
            part_sum = gl.load(sums + index, mask=live, other=0.0)
            # A lane after the last segment has the maximum of all: its factor must not be 0.
            is_before = (slot >= -1) & (lane > 0)
            max_before = gl.load(maxima + before, mask=is_before, other=float("-inf"))
            indices.store(index)
            # All loads of a round are issued before the first result is used.
            values = ()
            for i in gl.static_range(STEP):
                pointers = partials + _shared_value(indices, i) * DV + columns
                mask = inside & (base + i < rest)
                values = values + (gl.load(pointers, mask=mask, other=0.0),)
            # `segments.fold_sums`, of all segments of the round at once.
            max_before = gl.where(lane == 0, total_max, max_before)
            max_before = gl.associative_scan(max_before, 0, _maximum)
            new_max = gl.maximum(max_before, part_max)
            finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
            new = exp2(part_max - finite_max)
            olds.store(exp2(max_before - finite_max))
            news.store(new)
            addends.store(part_sum * new)
            for i in gl.static_range(STEP):
                old = _shared_value(olds, i)
                more = values[i] * _shared_value(news, i) + 0.0
                total = gl.fma(total, gl.full([COLUMNS], old, gl.float32, WIDE), more)
                total_sum = gl.fma(total_sum, old, _shared_value(addends, i))
            total_max = gl.maximum(total_max, gl.max(part_max, 0))
        finite_max = gl.where(total_max == float("-inf"), 0.0, total_max)
        acc_scale = 1.0
        if HAS_SINK:
            # The sink counts in the denominator, once (M4).
            sink = gl.load(sinks + head).to(gl.float32) * LOG2E
            new_max = gl.maximum(total_max, sink)
            finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
            acc_scale = exp2(total_max - finite_max)
            total_sum = gl.fma(total_sum, acc_scale, exp2(sink - finite_max))
        empty = total_sum == 0.0
        safe_sum = gl.where(empty, 1.0, total_sum)
        gl.store(output, (total * (acc_scale / safe_sum)).to(out.dtype.element_ty), mask=inside)
        if HAS_LSE:
            if gl.program_id(2) == 0:
                base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
                gl.store(lse + token.to(gl.int64) * stride_lt + head, base2 * LN2)
