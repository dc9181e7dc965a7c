"""Combine the splits of a request: inside the Hopper decode kernel, or in a kernel after it.

Where requests have few splits, the CTA that finishes the last split of a request combines all of
them (`combine_in_cta`), which saves a launch and the wait for it. A request with many splits needs
the parallelism of many programs, which `hopper_combine_kernel` has.

A split's partial result has index 2 * CTA + 1 if the split is not the first one of its CTA's tile
range, else 2 * CTA. All splits of a request but the first begin their range, and consecutive ranges
are NUM_KV_HEADS CTAs apart.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.hopper.kernels.compat import exp2, rounded_product
from attnlib.ops.triton.hopper.kernels.rotation import rotate_rows, value_levels
from attnlib.ops.triton.hopper.kernels.softmax import add_sink
from attnlib.ops.triton.kernels.hadamard import turned_back
from attnlib.ops.triton.kernels.softmax import finish_rows

__all__ = ["clear_rows", "combine_in_cta", "hopper_combine_kernel"]


@gluon.jit
def combine_in_cta(outputs, partials, split, first_partial, num_splits, config):
    """Combine the splits of one request and KV head, by one warpgroup, after all have been written.

    Args:
        outputs, partials, split, config: `Outputs`, `Partials`, `Split` and `DecodeConfig`.
        first_partial: index of the request's first split.
        num_splits: splits of the request.
    """
    DV: gl.constexpr = config.DV
    WIDTH_V: gl.constexpr = config.WIDTH_V
    ROWS: gl.constexpr = config.ROWS
    GROUP: gl.constexpr = config.GROUP
    SPLITS_PER_LOAD: gl.constexpr = config.SPLITS_PER_LOAD
    LANES: gl.constexpr = min(32, WIDTH_V // 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    row = gl.arange(0, ROWS, ROW)
    lanes = gl.arange(0, WIDTH_V, gl.SliceLayout(0, LAYOUT))
    token = row // GROUP
    head = split.kv_head * GROUP + row % GROUP
    valid = (row < partials.rows) & (token < split.query_len)
    mask = valid[:, None] & (lanes < DV)[None, :]
    acc = gl.zeros([ROWS, WIDTH_V], gl.float32, LAYOUT)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    for base in range(0, num_splits, SPLITS_PER_LOAD):
        # All loads of a round are issued before the first result is used, to overlap their latency.
        split_lses = ()
        values = ()
        for i in gl.static_range(SPLITS_PER_LOAD):
            index = (first_partial // 2 + (base + i) * config.NUM_KV_HEADS) * 2
            if i == 0:
                index = gl.where(base == 0, first_partial, index)
            live = base + i < num_splits
            offset = index * partials.rows + row
            # Other CTAs wrote these: ".cg" bypasses L1, which may hold stale lines.
            split_lses = split_lses + (
                gl.load(
                    partials.lses + offset,
                    mask=valid & live,
                    other=float("-inf"),
                    cache_modifier=".cg",
                ),
            )
            values = values + (
                gl.load(
                    partials.values + (offset * DV)[:, None] + lanes[None, :],
                    mask=mask & live,
                    other=0.0,
                    cache_modifier=".cg",
                ),
            )
        new_max = row_max
        for i in gl.static_range(SPLITS_PER_LOAD):
            new_max = gl.maximum(new_max, split_lses[i])
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        acc_scale = exp2(row_max - finite_max)
        acc = rounded_product(acc, acc_scale[:, None])
        row_sum = row_sum * acc_scale
        for i in gl.static_range(SPLITS_PER_LOAD):
            weight = exp2(split_lses[i] - finite_max)
            acc = gl.fma(weight[:, None], values[i], acc)
            row_sum += weight
        row_max = new_max
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    acc_scale = gl.full([ROWS], 1.0, gl.float32, ROW)
    if config.HAS_SINK:
        # No split has counted the sink, so it counts once (M4).
        sink = gl.load(outputs.sinks + head, mask=valid, other=0.0)
        finite_max, acc_scale, row_sum = add_sink(row_max, row_sum, sink)
    empty = row_sum == 0.0
    safe_sum = gl.where(empty, 1.0, row_sum)
    offsets = outputs.offsets(split.start + token, head)
    target = outputs.pointer + offsets[:, None] + lanes[None, :]
    result = (acc * (acc_scale / safe_sum)[:, None]).to(outputs.pointer.dtype.element_ty)
    if config.V_SIGNS:
        LEVELS: gl.constexpr = value_levels(WIDTH_V, DV)
        wide = result.to(gl.float32)
        result = rotate_rows(wide, lanes, config.V_SIGNS, DV, LEVELS, True, result.dtype)
    gl.store(target, result, mask=mask)
    if config.HAS_LSE:
        base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
        outputs.store_lses(split.start + token, head, base2, valid)


@gluon.jit
def clear_rows(outputs, batch, num_tokens, worker, num_workers, config):
    """Set rows after the last request to 0 and their LSEs to -inf (M6).

    The (row, KV head) pairs are distributed over the workers, one warpgroup each.
    """
    NUM_KV_HEADS: gl.constexpr = config.NUM_KV_HEADS
    GROUP: gl.constexpr = config.GROUP
    HEADS: gl.constexpr = config.ROWS
    WIDTH: gl.constexpr = config.WIDTH_V
    LANES: gl.constexpr = min(32, WIDTH // 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    within = gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))
    lanes = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    inside = within < GROUP
    num_rows = batch.num_rows()
    for pair in range(num_rows * NUM_KV_HEADS + worker, num_tokens * NUM_KV_HEADS, num_workers):
        token = pair // NUM_KV_HEADS
        head = pair % NUM_KV_HEADS * GROUP + within
        offsets = outputs.offsets(token, head)
        zeros = gl.zeros([HEADS, WIDTH], gl.float32, LAYOUT).to(outputs.pointer.dtype.element_ty)
        gl.store(
            outputs.pointer + offsets[:, None] + lanes[None, :],
            zeros,
            mask=inside[:, None] & (lanes < config.DV)[None, :],
        )
        if config.HAS_LSE:
            empty_lse = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
            outputs.store_lses(token, head, empty_lse, inside)


@triton.jit(
    do_not_specialize=[
        *("num_reqs", "rows", "stride_ot", "stride_oh", "stride_lt", "apart", "num_tokens"),
    ],
    do_not_specialize_on_alignment=[
        "sinks",
        "lse",
        "query_start_loc",
        "split_headers",
        "partial_lses",
    ],
)
def hopper_combine_kernel(
    partials,
    partial_lses,
    split_headers,
    query_start_loc,
    sinks,
    out,
    lse,
    num_reqs,
    rows,
    stride_ot,
    stride_oh,
    stride_lt,
    apart,
    num_tokens,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    STEP: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PARTS: tl.constexpr = 1,
    V_SIGNS: tl.constexpr = 0,
    TOKENS: tl.constexpr = 1,
    TURNS_ALL: tl.constexpr = False,
):
    """Combine the splits of HEADS query heads of a KV head, of one token or several.

    Grid: (tokens, KV heads, blocks of HEADS in a group times PARTS). With TOKENS, a power of 2, a
    program has equal parts of `num_tokens`, of at most that many, and loads their headers at once.
    Rows after the last request become 0 (M6). `split_headers` is [token, KV head], written by the
    CTA that has the request's first tile. Each of PARTS programs combines DV_PAD elements of the
    values. Consecutive splits of a request are `apart` CTAs apart, None for NUM_KV_HEADS. V_SIGNS
    is that of `DecodeConfig`; with TURNS_ALL, outputs of single splits are rotated back, too.
    """
    # PDL: started early; nothing may be read before the decode kernel has ended.
    gdc_wait()
    gdc_launch_dependents()
    if query_start_loc is None:
        num_rows = num_reqs
    else:
        num_rows = tl.load(query_start_loc + num_reqs)
    kv_head = tl.program_id(1)
    within = tl.program_id(2) // PARTS * HEADS + tl.arange(0, HEADS)
    head = kv_head * GROUP + within
    inside = within < GROUP
    part = tl.program_id(2) % PARTS
    lanes = part * DV_PAD + tl.arange(0, DV_PAD)
    mask = inside[:, None] & (lanes < DV)[None, :]
    first = tl.program_id(0)
    end = first + 1
    if TOKENS > 1:
        each = tl.cdiv(num_tokens, tl.num_programs(0))
        first *= each
        end = tl.minimum(first + each, num_tokens)
        tokens = first + tl.arange(0, TOKENS)
        places = split_headers + tokens * NUM_KV_HEADS + kv_head
        headers = tl.load(places, mask=tokens < tl.minimum(end, num_rows), other=0)
        # The decode kernel has written the outputs of single splits.
        if (tl.max(headers & 511, 0) <= 1) & (end <= num_rows) & (not TURNS_ALL):
            end = first
    for token in range(first, end):
        header = tl.load(split_headers + token * NUM_KV_HEADS + kv_head)
        offsets = (
            token.to(tl.int64) * stride_ot + head.to(tl.int64)[:, None] * stride_oh + lanes[None, :]
        )
        # Header: bits 0-8 number of splits, bits 9-14 the token's first row, from bit 15 the index
        # of the request's first partial result.
        num_splits = header & 511
        if token >= num_rows:
            tl.store(
                out + offsets,
                tl.zeros([HEADS, DV_PAD], tl.float32).to(out.dtype.element_ty),
                mask=mask,
            )
            if HAS_LSE:
                tl.store(
                    lse + token.to(tl.int64) * stride_lt + head,
                    tl.full([HEADS], float("-inf"), tl.float32),
                    mask=inside & (part == 0),
                )
        elif (num_splits > 1) | TURNS_ALL:
            row = (header >> 9 & 63) + within
            first_partial = header >> 15
            acc = tl.zeros([HEADS, DV_PAD], tl.float32)
            row_max = tl.full([HEADS], float("-inf"), tl.float32)
            row_sum = tl.zeros([HEADS], tl.float32)
            between = NUM_KV_HEADS if apart is None else apart
            for base in range(0, num_splits, STEP):
                split = base + tl.arange(0, STEP)
                live = (split < num_splits)[:, None] & inside[None, :]
                following = (first_partial // 2 + split * between) * 2
                index = (
                    tl.where(split == 0, first_partial, following)[:, None] * rows + row[None, :]
                )
                split_lses = tl.load(partial_lses + index, mask=live, other=float("-inf"))
                values = tl.load(
                    partials + index[:, :, None] * DV + lanes[None, None, :],
                    mask=live[:, :, None] & (lanes < DV)[None, None, :],
                    other=0.0,
                )
                new_max = tl.maximum(row_max, tl.max(split_lses, 0))
                finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
                weights = tl.exp2(split_lses - finite_max[None, :])
                acc_scale = tl.exp2(row_max - finite_max)
                acc = acc * acc_scale[:, None] + tl.sum(weights[:, :, None] * values, 0)
                row_sum = row_sum * acc_scale + tl.sum(weights, 0)
                row_max = new_max
            sink = tl.zeros([HEADS], tl.float32)
            if HAS_SINK:
                sink += tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32)
            factor, base2_lse = finish_rows(row_max, row_sum, sink, HAS_SINK)
            target = out + offsets
            result = (acc * factor[:, None]).to(out.dtype.element_ty)
            combined = inside & (part == 0)
            if TURNS_ALL:
                # The decode kernel has written the output of a single split, and no partial result.
                is_whole = num_splits <= 1
                result = tl.where(
                    is_whole, tl.load(target, mask=mask & is_whole, other=0.0), result
                )
                combined &= num_splits > 1
            if V_SIGNS:
                result = turned_back(result, lanes, V_SIGNS, DV, result.dtype)
            tl.store(target, result, mask=mask)
            if HAS_LSE:
                tl.store(
                    lse + token.to(tl.int64) * stride_lt + head,
                    base2_lse * 0.6931471805599453,
                    mask=combined,
                )
