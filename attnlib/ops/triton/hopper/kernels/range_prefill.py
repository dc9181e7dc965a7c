"""The Hopper prefill of layers whose score function only selects a range of keys.

With exact bounds (`ScoreFunction.exact_bounds`) a mask replaces the function. Work items often have
few tiles of keys (windows, packed documents), so their time is limited by what happens between two
items. The loaders are those of `prefill_loader`; the
consumers differ from those of `prefill_consumer`:

- The first product of the next item is issued before the output of the current one is scaled and
  stored, and the bounds of its rows are loaded meanwhile.
- A warpgroup does not multiply by tiles of which its own rows see no key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate, exp2
from attnlib.ops.triton.hopper.kernels.decode_call import Outputs
from attnlib.ops.triton.hopper.kernels.prefill_call import (
    UNALIGNED,
    UNSPECIALIZED,
    PrefillCall,
    Scoring,
    mask_of,
)
from attnlib.ops.triton.hopper.kernels.prefill_loader import key_loader, value_loader
from attnlib.ops.triton.hopper.kernels.prefill_products import pack_weights, unpack_weights
from attnlib.ops.triton.hopper.kernels.prefill_rows import (
    clear_values,
    stage_rows,
    store_layout,
    store_rows,
    work_rows,
)
from attnlib.ops.triton.hopper.kernels.prefill_sources import CacheSource
from attnlib.ops.triton.hopper.kernels.prefill_storage import allocate_storage, allocate_tiles
from attnlib.ops.triton.hopper.kernels.query_tiles import bounded_tiles
from attnlib.ops.triton.hopper.kernels.schedule import Batch
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    LOG2E,
    mask_scores,
    online_softmax,
    score_factor,
    transform_scores,
)

__all__ = ["range_prefill_kernel"]


@aggregate
class _Work:
    """A work tile as a warpgroup sees it.

    Fields:
        work: `WorkTile`.
        known: its request, or any other one for work tiles without queries.
        begin, left_end, right_begin, end: tiles that the warpgroup multiplies by; at least one, if
            the work tile has any.
        last_valid: rows of the last tile of values that are to be kept; -1 if there is nothing to
            clear.
        has_query, has_tiles: whether it has queries, and keys.
    """

    work: Value
    known: Value
    begin: Value
    left_end: Value
    right_begin: Value
    end: Value
    last_valid: Value
    has_query: Value
    has_tiles: Value


@gluon.jit
def _receive(call, storage, mail, WARPGROUP: gl.constexpr, SKIP: gl.constexpr):
    """Receive a work tile, and find the tiles that a warpgroup multiplies by."""
    work = storage.mailbox.receive(mail)
    known = gl.minimum(gl.maximum(work.request, 0), call.batch.num_reqs - 1)
    has_query = (work.request >= 0) & (work.request < call.batch.num_reqs)
    begin = work.tiles.begin
    end = work.tiles.end
    has_tiles = has_query & (end > begin)
    left_end = work.tiles.left_end
    right_begin = work.tiles.right_begin
    BLOCK_N: gl.constexpr = call.config.BLOCK_N
    TOKENS: gl.constexpr = call.config.TILE_TOKENS // call.config.CONSUMERS
    own_begin = begin
    own_end = end
    if SKIP:
        own_begin, left_end, right_begin, own_end, _, _, _, _ = bounded_tiles(
            call.mask, work.first_token + WARPGROUP * TOKENS, work.query_len, work.seq_len,
            work.kv_head, known, call.aux, call.BOUNDS, 1, TOKENS, BLOCK_N,
        )  # fmt: skip
        # At most one at each end: a warpgroup that skips more would wait for keys that the other
        # one cannot release before it gets values from stages that this one still holds.
        own_end = gl.where((own_end < end) & (end - begin > 1), end - 1, end)
        own_begin = gl.where((own_begin > begin) & (own_end - begin > 1), begin + 1, begin)
    # TMA fills whole pages past the end with zeros, but not the rest of the last page.
    last_valid = work.seq_len - (end - 1) * BLOCK_N
    is_partial = (last_valid < BLOCK_N) & (work.seq_len % call.config.BLOCK_SIZE != 0)
    last_valid = gl.where(is_partial, last_valid, -1)
    return _Work(
        work, known, own_begin, left_end, right_begin, own_end, last_valid, has_query, has_tiles
    )  # fmt: skip


@gluon.jit
def _skip_keys(keys, step, count):
    """Release the keys of `count` tiles that only other warpgroups multiply by."""
    for number in range(0, count):
        keys.wait_full(step + number)
        keys.release(step + number)


@gluon.jit
def _skip_values(
    values, step, count, partial, last_valid, WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Release the values of `count` tiles that only other warpgroups multiply by. Those of tile
    `partial` from row `last_valid` on are cleared before."""
    for number in range(0, count):
        values.wait_full(step + number)
        if number == partial:
            clear_values(values.tile(step + number), last_valid, WARPGROUP, CONSUMERS)
        values.release(step + number)


@gluon.jit
def _first_product(storage, current, loaded, step, WARPGROUP: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Wait for the queries and the first tile of keys of a work tile, and issue their product.

    A work tile without them multiplies what the buffers hold; its product is not used.
    """
    queries = storage.queries
    keys = storage.keys
    q_stage = loaded % queries.ring.STAGES
    stage = step % keys.STAGES
    if current.has_query:
        mbarrier.wait(queries.ring.full.index(q_stage), queries.parity(loaded))
    if current.has_tiles:
        mbarrier.wait(keys.full.index(stage), (step // keys.STAGES) & 1)
    BLOCK_N: gl.constexpr = keys.memory.shape[1]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    return warpgroup_mma(
        queries.tile(q_stage * queries.BLOCKS + WARPGROUP),
        keys.memory.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True,
    )  # fmt: skip


@gluon.jit
def _row_bounds(call, current, WARPGROUP: gl.constexpr, ROW: gl.constexpr):
    """Return [first, last) of the keys that each of the 64 rows sees."""
    work = current.work
    token, head, _ = work_rows(call, work, WARPGROUP, ROW)
    positions = token + (work.seq_len - work.query_len)
    row_first, row_last = call.mask.span(positions, work.seq_len)
    low, high, _, _ = call.BOUNDS(positions, positions, work.seq_len, head, current.known, call.aux)
    row_first = gl.maximum(row_first, low)
    # The product of a work tile without key tiles is masked entirely.
    row_last = gl.where(current.has_tiles, gl.minimum(row_last, high), 0)
    return row_first, row_last


@gluon.jit
def _step(
    storage, q_tile, scoring, factor, row_first, row_last, full_begin, full_end, step, row_max,
    row_sum, acc, weights, tile, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Multiply by the keys of `tile` and by the values of the tile before it, then do the softmax.

    Tiles in [full_begin, full_end) need no mask. One loop serves all tiles: with a loop for each
    kind, ptxas 12.8 prepares the descriptors of the queries before the first loop only, which a
    work tile may skip (`tests/ops/triton/sass.py`).

    Returns:
        (row_max, row_sum, acc, packed weights of `tile`).
    """
    keys = storage.keys
    values = storage.values
    DTYPE: gl.constexpr = keys.memory.dtype
    BLOCK_N: gl.constexpr = keys.memory.shape[1]
    S_LAYOUT: gl.constexpr = row_last.type.layout.parent
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    stage = step % keys.STAGES
    parity = (step // keys.STAGES) & 1
    v_stage = (step - 1) % values.STAGES
    v_parity = ((step - 1) // values.STAGES) & 1
    mbarrier.wait(keys.full.index(stage), parity)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        q_tile, keys.memory.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(values.full.index(v_stage), v_parity)
    acc = warpgroup_mma(
        unpack_weights(weights, DTYPE, OPERAND), values.memory.index(v_stage), acc, is_async=True
    )  # fmt: skip
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(keys.empty.index(stage), count=1)
    scores = transform_scores(scores, factor, scoring.soft_cap, HAS_CAP)
    if (tile < full_begin) | (tile >= full_end):
        scores = mask_scores(scores, row_first, row_last, tile * BLOCK_N, True)
    probs, acc_scale, row_max, row_sum = online_softmax(
        scores, factor, row_max, row_sum, True, HAS_CAP
    )
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values.empty.index(v_stage), count=1)
    acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return row_max, row_sum, acc, pack_weights(probs, DTYPE)


@gluon.jit
def _visit_tiles(
    call, scoring, storage, current, loaded, step, factor, row_first, row_last, scores,
    WARPGROUP: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weigh the last tile, visit the others, and issue the product with the values of the last
    visited one. Returns (step, row_max, row_sum, acc)."""
    keys = storage.keys
    values = storage.values
    BLOCK_N: gl.constexpr = call.config.BLOCK_N
    HAS_CAP: gl.constexpr = call.config.HAS_CAP
    ROW: gl.constexpr = row_last.type.layout
    DTYPE: gl.constexpr = keys.memory.dtype
    end = current.end
    row_max = gl.full([64], float("-inf"), gl.float32, ROW)
    row_sum = gl.full([64], 0.0, gl.float32, ROW)
    WIDTH_V: gl.constexpr = values.memory.shape[2]
    acc = gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT)
    scores = transform_scores(scores, factor, scoring.soft_cap, HAS_CAP)
    scores = mask_scores(scores, row_first, row_last, (end - 1) * BLOCK_N, True)
    probs, _, row_max, row_sum = online_softmax(scores, factor, row_max, row_sum, True, HAS_CAP)
    weights = pack_weights(probs, DTYPE)
    if current.has_tiles & (current.last_valid >= 0):
        value = values.at(step)
        value.wait_full()
        clear_values(value.tile(), current.last_valid, WARPGROUP, call.config.CONSUMERS)
    queries = storage.queries
    q_tile = queries.tile(loaded % queries.ring.STAGES * queries.BLOCKS + WARPGROUP)
    step += current.has_tiles.to(gl.int32)
    # Masked tiles at the diagonal, unmasked tiles, masked tiles at the left.
    full_end = gl.minimum(current.right_begin, end - 1)
    full_begin = gl.maximum(gl.minimum(current.left_end, full_end), current.begin)
    full_end = gl.maximum(full_end, full_begin)
    for back in range(0, end - 1 - current.begin):
        row_max, row_sum, acc, weights = _step(
            storage, q_tile, scoring, factor, row_first, row_last, full_begin, full_end, step,
            row_max, row_sum, acc, weights, end - 2 - back, HAS_CAP,
        )  # fmt: skip
        step += 1
    if current.has_tiles:
        values.wait_full(step - 1)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    v_stage = (step + values.STAGES - 1) % values.STAGES
    acc = warpgroup_mma(
        unpack_weights(weights, DTYPE, OPERAND), values.memory.index(v_stage), acc, is_async=True
    )  # fmt: skip
    return step, row_max, row_sum, acc


@gluon.jit
def _finish(
    call, outputs, storage, current, loaded, row_max, row_sum, acc, WARPGROUP: gl.constexpr
):
    """Normalize the accumulator of a work tile, and store outputs and LSEs."""
    queries = storage.queries
    work = current.work
    WIDTH_V: gl.constexpr = acc.shape[1]
    DV: gl.constexpr = call.config.DV
    DTYPE: gl.constexpr = queries.ring.memory.dtype
    STORE: gl.constexpr = store_layout(WIDTH_V)
    ROW: gl.constexpr = row_max.type.layout
    O_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    token, head, valid = work_rows(call, work, WARPGROUP, ROW)
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    acc_scale = gl.full([64], 1.0, gl.float32, ROW)
    if call.config.HAS_SINK:
        if current.has_query:
            sink = gl.load(outputs.sinks + head, mask=valid, other=0.0).to(gl.float32) * LOG2E
            new_max = gl.maximum(row_max, sink)
            finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
            acc_scale = exp2(row_max - finite_max)
            row_sum = row_sum * acc_scale + exp2(sink - finite_max)
    empty = row_sum == 0.0
    safe_sum = gl.where(empty, 1.0, row_sum)
    if call.config.HAS_LSE:
        natural = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum)) * LN2
        gl.store(outputs.lses(work.start + token, head), natural, mask=valid)
    normalizer = gl.convert_layout(acc_scale / safe_sum, O_ROW)
    # Rows without a visible key may have been multiplied by anything.
    seen = gl.convert_layout(row_max != float("-inf"), O_ROW)
    tile = gl.where(seen[:, None], acc * normalizer[:, None], 0.0).to(DTYPE)
    token, head, valid = work_rows(call, work, WARPGROUP, gl.SliceLayout(1, STORE))
    offsets = outputs.offsets(work.start + token, head)
    if current.has_query:
        q_stage = loaded % queries.ring.STAGES
        q_tile = queries.tile(q_stage * queries.BLOCKS + WARPGROUP)
        stage_rows(q_tile, tile)
        store_rows(outputs.pointer, offsets, q_tile.load(STORE), valid, DV)
        # The next queries arrive here by TMA, after the staged output has been read.
        fence_async_shared()
        mbarrier.arrive(queries.ring.empty.index(q_stage), count=1)
    else:
        # Rows after the last request become 0 (M6).
        zeros = gl.zeros([64, WIDTH_V], DTYPE, STORE)
        store_rows(outputs.pointer, offsets, zeros, valid, DV)


@gluon.jit
def _consumer(call, scoring, outputs, storage, WARPGROUP: gl.constexpr):
    """Compute the 64 rows of consumer warpgroup WARPGROUP of each published work tile.

    Needs queries loaded by TMA into at least two stages, a 16-bit cache, and outputs as wide as the
    queries.
    """
    keys = storage.keys
    values = storage.values
    CONSUMERS: gl.constexpr = call.config.CONSUMERS
    # A warpgroup whose rows span several tiles of keys skips tiles that only others see.
    SKIP: gl.constexpr = call.config.TILE_TOKENS // CONSUMERS >= call.config.BLOCK_N
    WIDTH_V: gl.constexpr = values.memory.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, call.config.BLOCK_N, 16]
    )
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    factor = score_factor(scoring.scale, scoring.soft_cap, call.config.HAS_CAP)
    call.begin()
    loaded = 0
    step = 0
    current = _receive(call, storage, 0, WARPGROUP, SKIP)
    mail = 1
    if SKIP:
        skipped = gl.where(current.has_tiles, current.work.tiles.end - current.end, 0)
        _skip_keys(keys, step, skipped)
        partial = gl.where(current.last_valid >= 0, 0, -1)
        _skip_values(values, step, skipped, partial, current.last_valid, WARPGROUP, CONSUMERS)
        step += skipped
        current = _cleared(current, skipped)
    scores = _first_product(storage, current, loaded, step, WARPGROUP, S_LAYOUT)
    row_first, row_last = _row_bounds(call, current, WARPGROUP, ROW)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if current.has_tiles:
        keys.release(step)
    request = current.work.request
    while request >= 0:
        step, row_max, row_sum, acc = _visit_tiles(
            call, scoring, storage, current, loaded, step, factor, row_first, row_last, scores,
            WARPGROUP, O_LAYOUT,
        )  # fmt: skip
        v_stage = (step + values.STAGES - 1) % values.STAGES
        # Issue the first product of the next work tile behind it.
        more = current.has_query.to(gl.int32)
        following = _receive(call, storage, mail, WARPGROUP, SKIP)
        mail += 1
        next_step = step
        if SKIP:
            trailing = gl.where(current.has_tiles, current.begin - current.work.tiles.begin, 0)
            skipped = gl.where(following.has_tiles, following.work.tiles.end - following.end, 0)
            _skip_keys(keys, step, trailing + skipped)
            next_step += trailing + skipped
        scores = _first_product(storage, following, loaded + more, next_step, WARPGROUP, S_LAYOUT)
        row_first, row_last = _row_bounds(call, following, WARPGROUP, ROW)

        # One group may stay in flight: the product with the values is complete.
        acc = warpgroup_mma_wait(1, deps=[acc])
        if current.has_tiles:
            mbarrier.arrive(values.empty.index(v_stage), count=1)
        if SKIP:
            is_partial = (skipped > 0) & (following.last_valid >= 0)
            partial = gl.where(is_partial, trailing, -1)
            _skip_values(
                values, step, trailing + skipped, partial, following.last_valid, WARPGROUP,
                CONSUMERS,
            )  # fmt: skip
            following = _cleared(following, skipped)
        _finish(call, outputs, storage, current, loaded, row_max, row_sum, acc, WARPGROUP)
        scores = warpgroup_mma_wait(0, deps=[scores])
        if following.has_tiles:
            keys.release(next_step)
        loaded += more
        step = next_step
        current = following
        request = current.work.request


@gluon.jit
def _cleared(current, skipped):
    """Return a work tile whose last tile of values, if it was skipped, has been cleared."""
    last_valid = gl.where(skipped > 0, -1, current.last_valid)
    return _Work(
        current.work, current.known, current.begin, current.left_end, current.right_begin,
        current.end, last_valid, current.has_query, current.has_tiles,
    )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def range_prefill_kernel(
    key_desc, value_desc, query_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2,
    aux3, query_start_loc, seq_lens, block_table, counters, scale, soft_cap, left, right, chunk,
    num_reqs, num_tokens, num_tiles, concurrent, l2_heads, num_blocks, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, BOUNDS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps for each of two consumers and 1 + 1 loader warps.

    Runtime arguments and grid are those of `hopper_prefill_kernel`. BOUNDS returns one range.
    """
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    DTYPE: gl.constexpr = key_desc.dtype
    STAGES: gl.constexpr = CONFIG.STAGES
    q_tiles = allocate_tiles(DTYPE, CONFIG.Q_STAGES * CONFIG.CONSUMERS, 64, CONFIG.WIDTH)
    k_tiles = allocate_tiles(DTYPE, STAGES, CONFIG.BLOCK_N, CONFIG.WIDTH)
    v_tiles = allocate_tiles(DTYPE, STAGES, CONFIG.BLOCK_N, CONFIG.WIDTH_V)
    storage = allocate_storage(q_tiles, k_tiles, v_tiles, CONFIG, CONFIG.CONSUMERS + 1)
    scoring = Scoring(scale, soft_cap, None, None, None, None, None)
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    call = PrefillCall(
        Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table),
        num_tokens, num_tiles, l2_heads, counters, concurrent, mask_of(left, right, chunk, CONFIG),
        aux, BOUNDS, CONFIG,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (call, scoring, outputs, storage, 0)),
            (_consumer, (call, scoring, outputs, storage, 1)),
            (key_loader, (call, storage, CacheSource(key_desc, 1, 0), query_desc)),
            (value_loader, (call, storage, CacheSource(value_desc, 1, 0))),
        ],
        [4, 1, 1],
        [CONFIG.CONSUMER_REGISTERS, CONFIG.PRODUCER_REGISTERS, CONFIG.PRODUCER_REGISTERS],
    )
