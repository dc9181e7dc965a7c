"""The Hopper prefill with float8 products, over copies of a float8 cache.

Queries are rounded to e4m3 with a power of two per row as scale; keys and values are those of the
cache. Both products run at twice the rate of 16-bit ones.

- WGMMA reads 8-bit operands only where the contracted dimension is contiguous, so the copies of the
  values are transposed, `[KV heads * elements, keys]`. In each 16 keys of a copy, key
  8 a + 2 t + r is at position 4 t + 2 a + r: the weights that a thread computes are the operands
  that it needs, without an exchange between threads.
- Float8 products accumulate in fewer bits than float32. Each tile has a product with the values of
  its own, which is added to the accumulator in float32 (two-level accumulation).
- Three consumer warpgroups overlap each other: the softmax of one runs during the products of the
  others. Within a warpgroup, one product follows the other, so that a thread holds the accumulator
  and one product at a time, in 160 registers.

The loader of keys and queries is that of `prefill`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.barriers import allocate_barriers
from attnlib.ops.triton.hopper.kernels.compat import (
    launch_dependent_grids,
    load_box,
    partition_barrier,
    reinterpret,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.mailbox import receive
from attnlib.ops.triton.hopper.kernels.prefill import (
    UNALIGNED,
    UNSPECIALIZED,
    item_rows,
    key_loader,
    stage_rows,
    store_rows,
)
from attnlib.ops.triton.hopper.kernels.quantized import load_kv_scale, query_powers
from attnlib.ops.triton.hopper.kernels.ring import Ring
from attnlib.ops.triton.hopper.kernels.schedule import visible_span, visited_tiles
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    LOG2E,
    lane_sums,
    mask_scores,
    online_softmax_by_row,
)

__all__ = ["float8_prefill_kernel"]

_WEIGHT_EXPONENT = gl.constexpr(8.0)
"""Weights are at most 2^8; the largest e4m3 number is 448, and the least normal one 2^-6."""


@gluon.jit
def _value_loader(
    value_desc, block_table, left, right, chunk, num_reqs, mailbox, v_ring, mail_full, mail_empty,
    v_full, v_empty, TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    FIELDS: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr,
):  # fmt: skip
    """Load the transposed values of the published work items. One warp."""
    DV: gl.constexpr = v_ring.shape[1]
    mail = 0
    step = 0
    request = 0
    while request >= 0:
        (
            request, _, first_token, kv_head, query_len, seq_len, _, _, _, _, _, _, _, _,
        ) = receive(mailbox, mail_full, mail_empty, mail, 0, FIELDS)  # fmt: skip
        mail += 1
        if (request >= 0) & (request < num_reqs):
            begin, _, _, end = visited_tiles(
                first_token, query_len, seq_len, left, right, chunk, request, None, None,
                TILE_TOKENS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            column = value_column(gl.load(block_table + request), request)
            for back in range(0, end - begin):
                stage = step % STAGES
                mbarrier.wait(v_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(v_full.index(stage), DV * BLOCK_N)
                first = column + (end - 1 - back) * BLOCK_N
                load_box(
                    value_desc, [kv_head * DV, first // 2], v_full.index(stage),
                    v_ring.index(stage),
                )  # fmt: skip
                step += 1


@gluon.jit
def value_column(first_row, request):
    """Return the first column of the values of a request, whose keys begin at `first_row`.

    It is a multiple of 16, and at least 128 columns follow the last key of the request before it,
    which `transposed_copy` sets to 0 up to the end of a tile.
    """
    return first_row // 16 * 16 + request * 144


@gluon.jit
def _float8_queries(tile):
    """View the first half of a tile of 16-bit queries as float8 elements of the same shape."""
    ROWS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    halves = reinterpret(
        tile, gl.float8e4nv, [2, ROWS, WIDTH], gl.NVMMASharedLayout(min(WIDTH, 128), 8, 2)
    )
    return halves.index(0)


@gluon.jit
def _quantize_queries(source, target):
    """Round queries [64, W] to e4m3, each row times the power of two that brings its largest
    magnitude to [2^7, 2^8). `target` may be a part of `source`.

    Returns:
        The inverse powers [64]; NaN for rows with infinities.
    """
    WIDTH: gl.constexpr = source.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    rows = source.load(LAYOUT).to(gl.float32)
    largest = gl.max(gl.abs(rows), 1)
    power, inverse = query_powers(largest)
    # All four warps have loaded their rows.
    partition_barrier()
    target.store((rows * (power * 2.0**-7)[:, None]).to(gl.float8e4nv))
    # WGMMA reads shared memory through the async proxy: fence, then wait for all four warps.
    fence_async_shared()
    partition_barrier()
    return gl.where(largest == float("inf"), float("nan"), inverse * 2.0**7)


@gluon.jit
def _pack_weights(weights, OPERAND: gl.constexpr):
    """Round weights [M, N] to e4m3, as the operand of the product with permuted values."""
    M: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    pairs = gl.permute(gl.reshape(weights, [M, N // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f", [gl.convert_layout(gl.reshape(pairs, [M, N]), OPERAND)], gl.float8e4nv, True,
        4,
    )  # fmt: skip


@gluon.jit
def _weigh(
    scores, tile, row_first, row_last, row_max, row_sum, row_factor, MASKED: gl.constexpr,
    CHECK_FIRST: gl.constexpr,
):  # fmt: skip
    """Turn raw products with the keys of `tile` into weights; as `online_softmax_by_row`."""
    if MASKED:
        scores = mask_scores(scores, row_first, row_last, tile * scores.shape[1], CHECK_FIRST)
    return online_softmax_by_row(
        scores, row_factor, row_max, row_sum, _WEIGHT_EXPONENT, MASKED, True
    )


@gluon.jit
def _float8(tile):
    """View a stage of 16-bit words as float8 elements."""
    ROWS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = 2 * tile.shape[1]
    return reinterpret(
        tile, gl.float8e4nv, [ROWS, WIDTH], gl.NVMMASharedLayout(min(WIDTH, 128), 8, 2)
    )


@gluon.jit
def _first_product(q_tile, keys, step, ZEROS):
    """Wait for the first tile of keys and return its product with the queries."""
    key = keys.at(step)
    key.wait_full()
    scores = warpgroup_mma(
        q_tile, _float8(key.tile()).permute((1, 0)), ZEROS, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    key.release()
    return scores


@gluon.jit
def _step(
    q_tile, keys, values, scores, acc, row_max, row_sum, step,
    tile, row_first, row_last, row_factor, MASKED: gl.constexpr,
    CHECK_FIRST: gl.constexpr,
):  # fmt: skip
    """Weigh the values of `tile`, number `step`, then multiply by the keys of the next one.

    Returns:
        (scores of the next tile, acc, row_max, row_sum).
    """
    O_LAYOUT: gl.constexpr = acc.type.layout
    S_LAYOUT: gl.constexpr = scores.type.layout
    value = values.at(step)
    next_key = keys.at(step + 1)
    probs, acc_scale, row_max, row_sum = _weigh(
        scores, tile, row_first, row_last, row_max, row_sum, row_factor, MASKED, CHECK_FIRST
    )
    weights = _pack_weights(probs, gl.DotOperandLayout(0, O_LAYOUT, 4))
    value.wait_full()
    zeros = gl.zeros([acc.shape[0], acc.shape[1]], gl.float32, O_LAYOUT)
    added = warpgroup_mma(
        weights, _float8(value.tile()).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    added = warpgroup_mma_wait(0, deps=[added])
    value.release()
    acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, O_LAYOUT))[:, None] + added
    next_key.wait_full()
    no_scores = gl.zeros([scores.shape[0], scores.shape[1]], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        q_tile, _float8(next_key.tile()).permute((1, 0)), no_scores, use_acc=False,
        is_async=True)  # fmt: skip
    scores = warpgroup_mma_wait(0, deps=[scores])
    next_key.release()
    return scores, acc, row_max, row_sum


@gluon.jit
def _consumer(
    out, lse, k_scale, v_scale, scale, left, right, chunk, num_reqs, concurrent, stride_ot,
    stride_oh, stride_lt, mailbox, q_tiles, k_ring, v_ring, mail_full, mail_empty, q_full,
    q_empty, k_full, k_empty, v_full, v_empty, WARPGROUP: gl.constexpr, GROUP: gl.constexpr,
    TILE_TOKENS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, FIELDS: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    HAS_LSE: gl.constexpr, K_SCALE_KIND: gl.constexpr, V_SCALE_KIND: gl.constexpr,
):  # fmt: skip
    """Compute the 64 rows of consumer warpgroup WARPGROUP of each published work item."""
    CONSUMERS: gl.constexpr = q_tiles.shape[0] // Q_STAGES
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    WIDTH_V: gl.constexpr = v_ring.shape[1]
    DTYPE: gl.constexpr = q_tiles.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 32])
    V_LANES: gl.constexpr = min(32, WIDTH_V // 8)
    STORE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // V_LANES, V_LANES], [4, 1], [1, 0])
    STORE_ROW: gl.constexpr = gl.SliceLayout(1, STORE_LAYOUT)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    CHECK_LEFT: gl.constexpr = HAS_LEFT or HAS_CHUNK
    keys = Ring(k_ring, k_full, k_empty, STAGES)
    values = Ring(v_ring, v_full, v_empty, STAGES)
    if concurrent == 0:
        # PDL: the previous kernel may have written the queries or read the output.
        wait_on_dependent_grids()
        launch_dependent_grids()
    mail = 0
    loaded = 0
    step = 0
    request = 0
    while request >= 0:
        (
            request, start, first_token, kv_head, query_len, seq_len, _, _, _, _, _, _, _, _,
        ) = receive(mailbox, mail_full, mail_empty, mail, 0, FIELDS)  # fmt: skip
        mail += 1
        if request == num_reqs:
            # Rows after the last request become 0 (M6).
            token, head, valid = item_rows(
                first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS, STORE_ROW
            )
            offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
            store_rows(out, offsets, gl.zeros([64, WIDTH_V], DTYPE, STORE_LAYOUT), valid, WIDTH_V)
            if HAS_LSE:
                empty_lse = gl.full([64], float("-inf"), gl.float32, STORE_ROW)
                gl.store(
                    lse + (start + token).to(gl.int64) * stride_lt + head, empty_lse, mask=valid
                )
        if (request >= 0) & (request < num_reqs):
            begin, left_end, right_begin, end = visited_tiles(
                first_token, query_len, seq_len, left, right, chunk, request, None, None,
                TILE_TOKENS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            q_stage = loaded % Q_STAGES
            q_tile = q_tiles.index(q_stage * CONSUMERS + WARPGROUP)
            mbarrier.wait(q_full.index(q_stage), (loaded // Q_STAGES) & 1)
            loaded += 1
            q_own = _float8_queries(q_tile)
            row_factor = gl.convert_layout(_quantize_queries(q_tile, q_own), ROW)
            row_factor *= scale * LOG2E * load_kv_scale(k_scale, kv_head, K_SCALE_KIND)
            # Masked scores are -inf, and -inf * 0 would be NaN.
            row_factor = gl.where(row_factor < 2.0**-105, 2.0**-105, row_factor)
            token, head, valid = item_rows(
                first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS, ROW
            )
            row_first, row_last = visible_span(
                token + (seq_len - query_len), seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
                HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            row_max = gl.full([64], float("-inf"), gl.float32, ROW)
            row_sum = lane_sums(gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT))
            acc = gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT)
            if end > begin:
                scores = _first_product(
                    q_own, keys, step, gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT),
                )  # fmt: skip
                # Masked tiles at the diagonal, unmasked tiles, masked tiles at the left, and the
                # first tile.
                full_end = gl.minimum(gl.maximum(right_begin, begin + 1), end)
                full_begin = gl.minimum(gl.maximum(left_end, begin + 1), full_end)
                for back in range(0, end - full_end):
                    scores, acc, row_max, row_sum = _step(
                        q_own, keys, values, scores, acc,
                        row_max, row_sum, step, end - 1 - back, row_first, row_last,
                        row_factor, True, CHECK_LEFT)  # fmt: skip
                    step += 1
                for back in range(0, full_end - full_begin):
                    scores, acc, row_max, row_sum = _step(
                        q_own, keys, values, scores, acc,
                        row_max, row_sum, step, full_end - 1 - back, row_first, row_last,
                        row_factor, False, CHECK_LEFT)  # fmt: skip
                    step += 1
                if CHECK_LEFT:
                    for back in range(0, full_begin - begin - 1):
                        scores, acc, row_max, row_sum = _step(
                            q_own, keys, values, scores, acc,
                            row_max, row_sum, step, full_begin - 1 - back, row_first, row_last,
                            row_factor, True, CHECK_LEFT)  # fmt: skip
                        step += 1
                probs, acc_scale, row_max, row_sum = _weigh(
                    scores, begin, row_first, row_last, row_max, row_sum, row_factor, True,
                    CHECK_LEFT)  # fmt: skip
                weights = _pack_weights(probs, gl.DotOperandLayout(0, O_LAYOUT, 4))
                stage = step % STAGES
                mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
                added = warpgroup_mma(
                    weights, _float8(v_ring.index(stage)).permute((1, 0)),
                    gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT), use_acc=False, is_async=True,
                )  # fmt: skip
                added = warpgroup_mma_wait(0, deps=[added])
                mbarrier.arrive(v_empty.index(stage), count=1)
                acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, O_LAYOUT))[:, None]
                acc = acc + added
                step += 1
            row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)
            empty = row_sum == 0.0
            safe_sum = gl.where(empty, 1.0, row_sum)
            if HAS_LSE:
                finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
                base2 = finite_max + gl.log2(safe_sum) - _WEIGHT_EXPONENT
                natural = gl.where(empty, float("-inf"), base2 * LN2)
                gl.store(lse + (start + token).to(gl.int64) * stride_lt + head, natural, mask=valid)
            normalizer = load_kv_scale(v_scale, kv_head, V_SCALE_KIND) / safe_sum
            normalizer = gl.convert_layout(normalizer, gl.SliceLayout(1, O_LAYOUT))
            stage_rows(q_tile, (acc * normalizer[:, None]).to(DTYPE))
            token, head, valid = item_rows(
                first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS, STORE_ROW
            )
            offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
            store_rows(out, offsets, q_tile.load(STORE_LAYOUT), valid, WIDTH_V)
            # The next queries arrive here by TMA, after the staged output has been read.
            fence_async_shared()
            mbarrier.arrive(q_empty.index(q_stage), count=1)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def float8_prefill_kernel(
    key_desc, value_desc, query_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2,
    aux3, query_start_loc, seq_lens, block_table, counters, scale, soft_cap, left, right, chunk,
    num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    PERSISTENT: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    HAS_LSE: gl.constexpr, K_SCALE_KIND: gl.constexpr, V_SCALE_KIND: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps for each of three consumers and 1 + 1 loader warps.

    Runtime arguments, grid and constants are those of `hopper_prefill_kernel` without pages, which
    has more constants. The copies of keys and values are described as 16-bit words.
    """
    FIELDS: gl.constexpr = 6
    QUERY: gl.constexpr = query.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(
        QUERY, [Q_STAGES * CONSUMERS, 64, WIDTH],
        gl.NVMMASharedLayout.get_default_for([64, WIDTH], QUERY),
    )  # fmt: skip
    k_ring = gl.allocate_shared_memory(
        gl.int16, [STAGES, BLOCK_N, WIDTH // 2],
        gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH // 2], gl.int16),
    )  # fmt: skip
    v_ring = gl.allocate_shared_memory(
        gl.int16, [STAGES, WIDTH_V, BLOCK_N // 2],
        gl.NVMMASharedLayout.get_default_for([WIDTH_V, BLOCK_N // 2], gl.int16),
    )  # fmt: skip
    mailbox, mail_full, mail_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = (
        allocate_barriers(FIELDS, STAGES, Q_STAGES, CONSUMERS, CONSUMERS + 1, 1)
    )
    gl.warp_specialize(
        [
            (_consumer, (
                out, lse, k_scale, v_scale, scale, left, right, chunk, num_reqs, concurrent,
                stride_ot, stride_oh, stride_lt, mailbox, q_tiles, k_ring, v_ring,
                mail_full, mail_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty, 0, GROUP,
                TILE_TOKENS, STAGES, Q_STAGES, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
                HAS_LSE, K_SCALE_KIND, V_SCALE_KIND)),
            (_consumer, (
                out, lse, k_scale, v_scale, scale, left, right, chunk, num_reqs, concurrent,
                stride_ot, stride_oh, stride_lt, mailbox, q_tiles, k_ring, v_ring,
                mail_full, mail_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty, 1, GROUP,
                TILE_TOKENS, STAGES, Q_STAGES, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
                HAS_LSE, K_SCALE_KIND, V_SCALE_KIND)),
            (_consumer, (
                out, lse, k_scale, v_scale, scale, left, right, chunk, num_reqs, concurrent,
                stride_ot, stride_oh, stride_lt, mailbox, q_tiles, k_ring, v_ring,
                mail_full, mail_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty, 2, GROUP,
                TILE_TOKENS, STAGES, Q_STAGES, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
                HAS_LSE, K_SCALE_KIND, V_SCALE_KIND)),
            (key_loader, (
                key_desc, query_desc, query_start_loc, seq_lens, block_table, counters, left, right,
                chunk, num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks,
                stride_table, mailbox, q_tiles, k_ring, mail_full, mail_empty, q_full, q_empty,
                k_full, k_empty, None, None, None, None, None, None, None, 0, NUM_KV_HEADS, 1,
                GROUP, TILE_TOKENS, BLOCK_N, 0, STAGES, Q_STAGES, CONSUMERS, True, PERSISTENT,
                FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, WIDTH, WIDTH_V)),
            (_value_loader, (
                value_desc, block_table, left, right, chunk, num_reqs, mailbox, v_ring, mail_full,
                mail_empty, v_full, v_empty, TILE_TOKENS, BLOCK_N, STAGES, FIELDS, CAUSAL, HAS_LEFT,
                HAS_RIGHT, HAS_CHUNK)),
        ],
        [4, 4, 1, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
