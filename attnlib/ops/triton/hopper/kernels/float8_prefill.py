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

The loader of keys and queries is that of `prefill_loader`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from attnlib.ops.triton.hopper.kernels.compat import load_box
from attnlib.ops.triton.hopper.kernels.decode_call import Outputs
from attnlib.ops.triton.hopper.kernels.float8_operands import (
    float8_queries,
    quantize_queries,
    value_column,
)
from attnlib.ops.triton.hopper.kernels.float8_visits import WEIGHT_EXPONENT, Float8Rows, attend
from attnlib.ops.triton.hopper.kernels.kv_scales import (
    factor_without_keys,
    is_tensor,
    load_kv_scale,
    sums_of_keys,
    valid_factor,
)
from attnlib.ops.triton.hopper.kernels.lanes import lane_sums
from attnlib.ops.triton.hopper.kernels.prefill_call import (
    UNALIGNED,
    UNSPECIALIZED,
    PrefillCall,
    Scoring,
    mask_of,
)
from attnlib.ops.triton.hopper.kernels.prefill_loader import key_loader
from attnlib.ops.triton.hopper.kernels.prefill_rows import (
    stage_rows,
    store_empty_rows,
    store_layout,
    store_rows,
    work_rows,
)
from attnlib.ops.triton.hopper.kernels.prefill_sources import CacheSource
from attnlib.ops.triton.hopper.kernels.prefill_storage import allocate_storage, allocate_tiles
from attnlib.ops.triton.hopper.kernels.schedule import Batch
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    LOG2E,
)

__all__ = ["float8_prefill_kernel"]


@gluon.jit
def _value_loader(call, storage, value_desc):
    """Load the transposed values of the published work tiles. One warp."""
    BLOCK_N: gl.constexpr = call.config.BLOCK_N
    DV: gl.constexpr = storage.values.memory.shape[1]
    values = storage.values
    mail = 0
    step = 0
    request = 0
    while request >= 0:
        work = storage.mailbox.receive(mail)
        request = work.request
        mail += 1
        if (request >= 0) & (request < call.batch.num_reqs):
            tiles = call.tiles(work)
            column = value_column(gl.load(call.batch.block_table + request), request)
            for back in range(0, tiles.end - tiles.begin):
                values.wait_empty(step)
                barrier = values.expect(step, DV * BLOCK_N)
                first = column + (tiles.end - 1 - back) * BLOCK_N
                load_box(value_desc, [work.kv_head * DV, first // 2], barrier, values.tile(step))
                step += 1


@gluon.jit
def _finish(
    call, scoring, outputs, work, q_tile, token, head, valid, row_max, row_sum, acc,
    WARPGROUP: gl.constexpr,
):  # fmt: skip
    """Normalize the accumulator of a work tile and store outputs and LSEs."""
    ROW: gl.constexpr = row_max.type.layout
    DTYPE: gl.constexpr = q_tile.dtype
    WIDTH_V: gl.constexpr = acc.shape[1]
    STORE: gl.constexpr = store_layout(WIDTH_V)
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)
    empty = row_sum == 0.0
    row_sum = sums_of_keys(row_sum, empty, scoring.k_scale, work.kv_head, call.config.K_SCALE_KIND)
    safe_sum = gl.where(empty, 1.0, row_sum)
    if call.config.HAS_LSE:
        finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
        base2 = finite_max + gl.log2(safe_sum) - WEIGHT_EXPONENT
        natural = gl.where(empty, float("-inf"), base2 * LN2)
        gl.store(outputs.lses(work.start + token, head), natural, mask=valid)
    v_factor = load_kv_scale(scoring.v_scale, work.kv_head, call.config.V_SCALE_KIND)
    normalizer = factor_without_keys(v_factor, empty, call.config.V_SCALE_KIND) / safe_sum
    normalizer = gl.convert_layout(normalizer, gl.SliceLayout(1, acc.type.layout))
    stage_rows(q_tile, (acc * normalizer[:, None]).to(DTYPE))
    token, head, valid = work_rows(call, work, WARPGROUP, gl.SliceLayout(1, STORE))
    offsets = outputs.offsets(work.start + token, head)
    store_rows(outputs.pointer, offsets, q_tile.load(STORE), valid, WIDTH_V)


@gluon.jit
def _consumer(call, scoring, outputs, storage, WARPGROUP: gl.constexpr):
    """Compute the 64 rows of consumer warpgroup WARPGROUP of each published work tile."""
    queries = storage.queries
    BLOCK_N: gl.constexpr = call.config.BLOCK_N
    WIDTH_V: gl.constexpr = storage.values.memory.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 32])
    STORE: gl.constexpr = store_layout(WIDTH_V)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    call.begin()
    mail = 0
    loaded = 0
    step = 0
    request = 0
    while request >= 0:
        work = storage.mailbox.receive(mail)
        request = work.request
        mail += 1
        if request == call.batch.num_reqs:
            token, head, valid = work_rows(call, work, WARPGROUP, gl.SliceLayout(1, STORE))
            store_empty_rows(
                outputs, work.start, token, head, valid, queries.ring.memory.dtype, STORE, WIDTH_V,
                WIDTH_V, call.config.HAS_LSE,
            )  # fmt: skip
        if (request >= 0) & (request < call.batch.num_reqs):
            tiles = call.tiles(work)
            q_stage = loaded % queries.ring.STAGES
            q_tile = queries.tile(q_stage * queries.BLOCKS + WARPGROUP)
            mbarrier.wait(queries.ring.full.index(q_stage), queries.parity(loaded))
            loaded += 1
            q_own = float8_queries(q_tile)
            row_factor = gl.convert_layout(quantize_queries(q_tile, q_own), ROW)
            k_scale = load_kv_scale(scoring.k_scale, work.kv_head, call.config.K_SCALE_KIND)
            row_factor *= scoring.scale * LOG2E * k_scale
            if is_tensor(call.config.K_SCALE_KIND):
                row_factor = valid_factor(row_factor)
            else:
                # Masked scores are -inf, and -inf * 0 would be NaN.
                row_factor = gl.where(row_factor < 2.0**-105, 2.0**-105, row_factor)
            token, head, valid = work_rows(call, work, WARPGROUP, ROW)
            first, last = call.mask.span(token + (work.seq_len - work.query_len), work.seq_len)
            rows = Float8Rows(
                q_own, row_factor, first, last, call.mask.HAS_LEFT or call.mask.HAS_CHUNK
            )
            row_max = gl.full([64], float("-inf"), gl.float32, ROW)
            row_sum = lane_sums(gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT))
            acc = gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT)
            if tiles.end > tiles.begin:
                step, row_max, row_sum, acc = attend(
                    storage, rows, tiles, step, row_max, row_sum, acc, S_LAYOUT
                )
            _finish(
                call, scoring, outputs, work, q_tile, token, head, valid, row_max, row_sum, acc,
                WARPGROUP,
            )  # fmt: skip
            # The next queries arrive here by TMA, after the staged output has been read.
            fence_async_shared()
            mbarrier.arrive(queries.ring.empty.index(q_stage), count=1)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def float8_prefill_kernel(
    key_desc, value_desc, query_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2,
    aux3, query_start_loc, seq_lens, block_table, counters, scale, soft_cap, left, right, chunk,
    num_reqs, num_tokens, num_tiles, concurrent, l2_heads, num_blocks, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps for each of three consumers and 1 + 1 loader warps.

    Runtime arguments and grid are those of `hopper_prefill_kernel` without pages. The copies of
    keys and values are described as 16-bit words.
    """
    QUERY: gl.constexpr = query.dtype.element_ty
    STAGES: gl.constexpr = CONFIG.STAGES
    q_tiles = allocate_tiles(QUERY, CONFIG.Q_STAGES * CONFIG.CONSUMERS, 64, CONFIG.WIDTH)
    k_tiles = allocate_tiles(gl.int16, STAGES, CONFIG.BLOCK_N, CONFIG.WIDTH // 2)
    v_tiles = allocate_tiles(gl.int16, STAGES, CONFIG.WIDTH_V, CONFIG.BLOCK_N // 2)
    storage = allocate_storage(q_tiles, k_tiles, v_tiles, CONFIG, CONFIG.CONSUMERS + 1)
    scoring = Scoring(scale, soft_cap, k_scale, v_scale, None, None, None)
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    call = PrefillCall(
        Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table),
        num_tokens, num_tiles, l2_heads, counters, concurrent, mask_of(left, right, chunk, CONFIG),
        None, None, None, CONFIG,
    )  # fmt: skip
    CONSUMERS: gl.constexpr = CONFIG.CONSUMER_REGISTERS
    PRODUCERS: gl.constexpr = CONFIG.PRODUCER_REGISTERS
    gl.warp_specialize(
        [
            (_consumer, (call, scoring, outputs, storage, 0)),
            (_consumer, (call, scoring, outputs, storage, 1)),
            (_consumer, (call, scoring, outputs, storage, 2)),
            (key_loader, (call, storage, CacheSource(key_desc, 1, 0), query_desc)),
            (_value_loader, (call, storage, value_desc)),
        ],
        [4, 4, 1, 1],
        [CONSUMERS, CONSUMERS, PRODUCERS, PRODUCERS],
    )
