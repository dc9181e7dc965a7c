"""Add the partial results of the batch-invariant decode (`invariant_decode.py`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import (
    exp2,
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_call import Outputs
from attnlib.ops.triton.hopper.kernels.invariant_rounds import (
    RoundMemory,
    RowTotals,
    SplitPartials,
    SplitTile,
    add_round,
    load_header,
)
from attnlib.ops.triton.hopper.kernels.softmax import LOG2E

__all__ = [
    "invariant_split_kernel",
]


@gluon.jit
def _clear(outputs, token, first_head, columns, inside, HEADS: gl.constexpr, HAS_LSE: gl.constexpr):
    """Set the rows of a token after the last request to 0 and their LSEs to -inf."""
    COLUMNS: gl.constexpr = columns.shape[0]
    LAYOUT: gl.constexpr = columns.type.layout
    out = outputs.pointer
    for head in range(first_head, first_head + HEADS):
        zeros = gl.zeros([COLUMNS], out.dtype.element_ty, LAYOUT)
        gl.store(out + outputs.offsets(token, head) + columns, zeros, mask=inside)
        if HAS_LSE:
            lses = outputs.lse + token.to(gl.int64) * outputs.stride_lse
            gl.store(lses + head, float("-inf"))


@gluon.jit
def _store_head(
    outputs, output, totals, token, head, tile, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr
):
    """Write the output at `output` and the LSE of a query head."""
    total_max = totals.row_max
    total_sum = totals.row_sum
    finite_max = gl.where(total_max == float("-inf"), 0.0, total_max)
    acc_scale = 1.0
    if HAS_SINK:
        # The sink counts in the denominator, once (M4).
        sink = gl.load(outputs.sinks + head).to(gl.float32) * LOG2E
        new_max = gl.maximum(total_max, sink)
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        acc_scale = exp2(total_max - finite_max)
        total_sum = gl.fma(total_sum, acc_scale, exp2(sink - finite_max))
    empty = total_sum == 0.0
    safe_sum = gl.where(empty, 1.0, total_sum)
    result = totals.values * (acc_scale / safe_sum)
    gl.store(output, result.to(outputs.pointer.dtype.element_ty), mask=tile.inside)
    if HAS_LSE:
        if gl.program_id(2) == 0:
            base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
            outputs.store_lses(token, head, base2, None)


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

    `split_headers` has the fields of `SplitHeader` for each token and KV head.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    WIDE: gl.constexpr = gl.BlockedLayout([COLUMNS // 32], [32], [1], [0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    # PDL: started early; nothing may be read before the decode kernel has ended.
    wait_on_dependent_grids()
    launch_dependent_grids()
    token = gl.program_id(0)
    first_head = gl.program_id(1) * HEADS
    columns = gl.program_id(2) * COLUMNS + gl.arange(0, COLUMNS, WIDE)
    inside = columns < DV
    kv_head = first_head // GROUP
    places = split_headers + (token * NUM_KV_HEADS + kv_head) * 8
    num_rows = gl.load(query_start_loc + num_reqs)
    header = load_header(places)
    if token >= num_rows:
        _clear(outputs, token, first_head, columns, inside, HEADS, HAS_LSE)
    # With no segment, the decode kernel has written the output.
    heads = gl.where((token < num_rows) & (header.rest > 0), HEADS, 0)
    memory = RoundMemory(
        gl.allocate_shared_memory(gl.int32, [STEP], VECTOR),
        gl.allocate_shared_memory(gl.float32, [STEP], VECTOR),
        gl.allocate_shared_memory(gl.float32, [STEP], VECTOR),
        gl.allocate_shared_memory(gl.float32, [STEP], VECTOR),
    )
    reciprocal = 1.0 / header.per_range.to(gl.float32)
    sums = partial_lses + grid * (slots + 1) * rows
    lane = gl.arange(0, STEP, LANES)
    tile = SplitTile(columns, inside, lane, reciprocal, kv_head, NUM_KV_HEADS, DV, STEP)
    results = SplitPartials(partials, partial_lses, sums, slots, rows)
    for head in range(first_head, first_head + heads):
        row = header.first_row + head % GROUP
        output = out + token.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh + columns
        own = (header.worker * (slots + 1) + slots) * rows + row
        values = gl.load(partials + own * DV + columns, mask=inside, other=0.0)
        totals = RowTotals(values, gl.load(partial_lses + own), gl.load(sums + own))
        for base in range(0, header.rest, STEP):
            totals = add_round(tile, header, results, memory, totals, base, row)
        _store_head(outputs, output, totals, token, head, tile, HAS_SINK, HAS_LSE)
