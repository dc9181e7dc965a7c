"""The Hopper prefill of layers whose score function only selects a range of keys.

With exact bounds (`ScoreFunction.exact_bounds`) a mask replaces the function. Work items often have
few tiles of keys (windows, packed documents), so their time is limited by what happens between two
items. The loaders are those of `prefill`; the consumers differ from its own:

- The first product of the next item is issued before the output of the current one is scaled and
  stored, and the bounds of its rows are loaded meanwhile.
- A warpgroup does not multiply by tiles of which its own rows see no key.
"""

from __future__ import annotations

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
    exp2,
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.mailbox import receive
from attnlib.ops.triton.hopper.kernels.mainloop import (
    pack_weights,
    unpack_weights,
)
from attnlib.ops.triton.hopper.kernels.prefill import (
    UNALIGNED,
    UNSPECIALIZED,
    clear_values,
    item_rows,
    key_loader,
    stage_rows,
    store_rows,
    value_loader,
)
from attnlib.ops.triton.hopper.kernels.schedule import bounded_tiles, visible_span
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    LOG2E,
    mask_scores,
    online_softmax,
    score_factor,
    transform_scores,
)

__all__ = ["range_prefill_kernel"]


@gluon.jit
def _own_tiles(
    begin, left_end, right_begin, end, first_token, query_len, seq_len, left, right, chunk, kv_head,
    request, aux, BOUNDS: gl.constexpr, SKIP: gl.constexpr, WARPGROUP: gl.constexpr,
    TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
):  # fmt: skip
    """Return (begin, left_end, right_begin, end) of the tiles that a warpgroup multiplies by.

    At least one tile, if the item has any.
    """
    own_begin = begin
    own_end = end
    if SKIP:
        own_begin, left_end, right_begin, own_end, _, _, _, _ = bounded_tiles(
            first_token + WARPGROUP * TOKENS, query_len, seq_len, left, right, chunk, kv_head,
            request, aux, BOUNDS, 1, TOKENS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
        )  # fmt: skip
        # At most one at each end: a warpgroup that skips more would wait for keys that the other
        # one cannot release before it gets values from stages that this one still holds.
        own_end = gl.where((own_end < end) & (end - begin > 1), end - 1, end)
        own_begin = gl.where((own_begin > begin) & (own_end - begin > 1), begin + 1, begin)
    return own_begin, left_end, right_begin, own_end


@gluon.jit
def _skip_keys(k_full, k_empty, step, count, STAGES: gl.constexpr):
    """Release the keys of `count` tiles that only other warpgroups multiply by."""
    for number in range(0, count):
        stage = (step + number) % STAGES
        mbarrier.wait(k_full.index(stage), ((step + number) // STAGES) & 1)
        mbarrier.arrive(k_empty.index(stage), count=1)


@gluon.jit
def _skip_values(
    v_full, v_empty, v_ring, step, count, partial, last_valid, WARPGROUP: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Likewise the values. Those of tile `partial` from row `last_valid` on are cleared before."""
    for number in range(0, count):
        stage = (step + number) % STAGES
        mbarrier.wait(v_full.index(stage), ((step + number) // STAGES) & 1)
        if number == partial:
            clear_values(v_ring.index(stage), last_valid, WARPGROUP, CONSUMERS)
        mbarrier.arrive(v_empty.index(stage), count=1)


@gluon.jit
def _first_product(
    q_tiles, k_ring, q_full, k_full, loaded, step, has_query, has_tiles, WARPGROUP: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CONSUMERS: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Wait for an item's queries and first tile of keys, and issue their product.

    An item without them multiplies what the buffers hold; its product is not used.
    """
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    q_stage = loaded % Q_STAGES
    stage = step % STAGES
    if has_query:
        mbarrier.wait(q_full.index(q_stage), (loaded // Q_STAGES) & 1)
    if has_tiles:
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    return warpgroup_mma(
        q_tiles.index(q_stage * CONSUMERS + WARPGROUP), k_ring.index(stage).permute((1, 0)), zeros,
        use_acc=False, is_async=True)  # fmt: skip


@gluon.jit
def _row_bounds(
    has_tiles, first_token, query_len, seq_len, left, right, chunk, kv_head, request, aux,
    BOUNDS: gl.constexpr, WARPGROUP: gl.constexpr, GROUP: gl.constexpr, TILE_TOKENS: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    ROW: gl.constexpr,
):  # fmt: skip
    """Return [first, last) of the keys that each of the 64 rows sees."""
    token, head, _ = item_rows(first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS, ROW)
    positions = token + (seq_len - query_len)
    row_first, row_last = visible_span(
        positions, seq_len, left, right, chunk, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    low, high, _, _ = BOUNDS(positions, positions, seq_len, head, request, aux)
    row_first = gl.maximum(row_first, low)
    # The product of an item without tiles is masked entirely.
    row_last = gl.where(has_tiles, gl.minimum(row_last, high), 0)
    return row_first, row_last


@gluon.jit
def _step(
    q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, row_max, row_sum, step,
    tile, full_begin, full_end, row_first, row_last, factor, soft_cap,
    STAGES: gl.constexpr, HAS_CAP: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """`mainloop.overlapped_step` without a score function, for masked and unmasked tiles.

    Tiles in [full_begin, full_end) need no mask. One loop serves all tiles: with a loop for each
    kind, ptxas 12.8 prepares the descriptors of the queries before the first loop only, which an
    item may skip (`tests/ops/triton/sass.py`).
    """
    DTYPE: gl.constexpr = k_ring.dtype
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    S_LAYOUT: gl.constexpr = row_last.type.layout.parent
    stage = step % STAGES
    parity = (step // STAGES) & 1
    v_stage = (step - 1) % STAGES
    v_parity = ((step - 1) // STAGES) & 1
    mbarrier.wait(k_full.index(stage), parity)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        q_tile, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(v_stage), v_parity)
    acc = warpgroup_mma(
        unpack_weights(weights, DTYPE, P_LAYOUT), v_ring.index(v_stage), acc, is_async=True
    )
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
    if (tile < full_begin) | (tile >= full_end):
        scores = mask_scores(scores, row_first, row_last, tile * BLOCK_N, True)
    probs, acc_scale, row_max, row_sum = online_softmax(
        scores, factor, row_max, row_sum, True, HAS_CAP
    )
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, pack_weights(probs, DTYPE), row_max, row_sum


@gluon.jit
def _consumer(
    out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs, concurrent, stride_ot,
    stride_oh, stride_lt, mailbox, q_tiles, k_ring, v_ring, mail_full, mail_empty, q_full, q_empty,
    k_full, k_empty, v_full, v_empty, aux, BOUNDS: gl.constexpr, SKIP: gl.constexpr,
    WARPGROUP: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr, TILE_TOKENS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, FIELDS: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr,
    HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Compute the 64 rows of consumer warpgroup WARPGROUP of each published work item.

    Needs queries loaded by TMA into at least two stages, a 16-bit cache, and outputs as wide as the
    queries.
    """
    WIDTH_V: gl.constexpr = v_ring.shape[2]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    DTYPE: gl.constexpr = q_tiles.dtype
    COMPUTE: gl.constexpr = k_ring.dtype
    TOKENS: gl.constexpr = TILE_TOKENS // CONSUMERS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    V_LANES: gl.constexpr = min(32, WIDTH_V // 8)
    STORE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // V_LANES, V_LANES], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    factor = score_factor(scale, soft_cap, HAS_CAP)
    if concurrent == 0:
        # PDL: the previous kernel may have written the queries or read the output.
        wait_on_dependent_grids()
        launch_dependent_grids()

    loaded = 0
    step = 0
    (
        request, start, first_token, kv_head, query_len, seq_len, item_begin, left_end, right_begin,
        item_end, _, _, _, _,
    ) = receive(mailbox, mail_full, mail_empty, 0, 1, FIELDS)  # fmt: skip
    mail = 1
    known = gl.minimum(gl.maximum(request, 0), num_reqs - 1)
    has_query = (request >= 0) & (request < num_reqs)
    has_tiles = has_query & (item_end > item_begin)
    begin, left_end, right_begin, end = _own_tiles(
        item_begin, left_end, right_begin, item_end, first_token, query_len, seq_len, left, right,
        chunk, kv_head, known, aux, BOUNDS, SKIP, WARPGROUP, TOKENS, BLOCK_N, CAUSAL, HAS_LEFT,
        HAS_RIGHT, HAS_CHUNK)  # fmt: skip
    # TMA fills whole pages past the end with zeros, but not the rest of the last page.
    last_valid = seq_len - (item_end - 1) * BLOCK_N
    last_valid = gl.where((last_valid < BLOCK_N) & (seq_len % BLOCK_SIZE != 0), last_valid, -1)
    if SKIP:
        skipped = gl.where(has_tiles, item_end - end, 0)
        _skip_keys(k_full, k_empty, step, skipped, STAGES)
        _skip_values(
            v_full, v_empty, v_ring, step, skipped, gl.where(last_valid >= 0, 0, -1), last_valid,
            WARPGROUP, STAGES, CONSUMERS)  # fmt: skip
        step += skipped
        last_valid = gl.where(skipped > 0, -1, last_valid)
    scores = _first_product(
        q_tiles, k_ring, q_full, k_full, loaded, step, has_query, has_tiles, WARPGROUP, STAGES,
        Q_STAGES, CONSUMERS, S_LAYOUT)  # fmt: skip
    row_first, row_last = _row_bounds(
        has_tiles, first_token, query_len, seq_len, left, right, chunk, kv_head, known, aux,
        BOUNDS, WARPGROUP, GROUP, TILE_TOKENS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
        ROW)  # fmt: skip
    scores = warpgroup_mma_wait(0, deps=[scores])
    if has_tiles:
        mbarrier.arrive(k_empty.index(step % STAGES), count=1)

    while request >= 0:
        row_max = gl.full([64], float("-inf"), gl.float32, ROW)
        row_sum = gl.full([64], 0.0, gl.float32, ROW)
        acc = gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT)
        scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
        scores = mask_scores(scores, row_first, row_last, (end - 1) * BLOCK_N, True)
        probs, _, row_max, row_sum = online_softmax(scores, factor, row_max, row_sum, True, HAS_CAP)
        weights = pack_weights(probs, COMPUTE)
        if has_tiles & (last_valid >= 0):
            stage = step % STAGES
            mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
            clear_values(v_ring.index(stage), last_valid, WARPGROUP, CONSUMERS)
        q_tile = q_tiles.index(loaded % Q_STAGES * CONSUMERS + WARPGROUP)
        step += has_tiles.to(gl.int32)
        # Masked tiles at the diagonal, unmasked tiles, masked tiles at the left.
        full_end = gl.minimum(right_begin, end - 1)
        full_begin = gl.maximum(gl.minimum(left_end, full_end), begin)
        full_end = gl.maximum(full_end, full_begin)
        for back in range(0, end - 1 - begin):
            acc, weights, row_max, row_sum = _step(
                q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, row_max,
                row_sum, step, end - 2 - back, full_begin, full_end, row_first, row_last, factor,
                soft_cap, STAGES, HAS_CAP, P_LAYOUT)  # fmt: skip
            step += 1
        if has_tiles:
            mbarrier.wait(v_full.index((step - 1) % STAGES), ((step - 1) // STAGES) & 1)
        # The product with the values of the last visited tile.
        v_stage = (step + STAGES - 1) % STAGES
        acc = warpgroup_mma(
            unpack_weights(weights, COMPUTE, P_LAYOUT), v_ring.index(v_stage), acc, is_async=True
        )

        # Issue the first product of the next item behind it.
        more = has_query.to(gl.int32)
        (
            request_b, start_b, first_token_b, kv_head_b, query_len_b, seq_len_b, item_begin_b,
            left_end_b, right_begin_b, item_end_b, _, _, _, _,
        ) = receive(mailbox, mail_full, mail_empty, mail, 1, FIELDS)  # fmt: skip
        mail += 1
        known_b = gl.minimum(gl.maximum(request_b, 0), num_reqs - 1)
        has_query_b = (request_b >= 0) & (request_b < num_reqs)
        has_tiles_b = has_query_b & (item_end_b > item_begin_b)
        begin_b, left_end_b, right_begin_b, end_b = _own_tiles(
            item_begin_b, left_end_b, right_begin_b, item_end_b, first_token_b, query_len_b,
            seq_len_b, left, right, chunk, kv_head_b, known_b, aux, BOUNDS, SKIP, WARPGROUP, TOKENS,
            BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        last_valid_b = seq_len_b - (item_end_b - 1) * BLOCK_N
        last_valid_b = gl.where(
            (last_valid_b < BLOCK_N) & (seq_len_b % BLOCK_SIZE != 0), last_valid_b, -1
        )
        step_b = step
        if SKIP:
            trailing = gl.where(has_tiles, begin - item_begin, 0)
            skipped = gl.where(has_tiles_b, item_end_b - end_b, 0)
            _skip_keys(k_full, k_empty, step, trailing + skipped, STAGES)
            step_b += trailing + skipped
        scores = _first_product(
            q_tiles, k_ring, q_full, k_full, loaded + more, step_b, has_query_b, has_tiles_b,
            WARPGROUP, STAGES, Q_STAGES, CONSUMERS, S_LAYOUT)  # fmt: skip
        row_first, row_last = _row_bounds(
            has_tiles_b, first_token_b, query_len_b, seq_len_b, left, right, chunk, kv_head_b,
            known_b, aux, BOUNDS, WARPGROUP, GROUP, TILE_TOKENS, CAUSAL, HAS_LEFT, HAS_RIGHT,
            HAS_CHUNK, ROW)  # fmt: skip

        # One group may stay in flight: the product with the values is complete.
        acc = warpgroup_mma_wait(1, deps=[acc])
        if has_tiles:
            mbarrier.arrive(v_empty.index(v_stage), count=1)
        if SKIP:
            partial = gl.where((skipped > 0) & (last_valid_b >= 0), trailing, -1)
            _skip_values(
                v_full, v_empty, v_ring, step, trailing + skipped, partial, last_valid_b, WARPGROUP,
                STAGES, CONSUMERS)  # fmt: skip
            last_valid_b = gl.where(skipped > 0, -1, last_valid_b)
        token, head, valid = item_rows(
            first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS, ROW
        )
        finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
        acc_scale = gl.full([64], 1.0, gl.float32, ROW)
        if HAS_SINK:
            if has_query:
                sink = gl.load(sinks + head, mask=valid, other=0.0).to(gl.float32) * LOG2E
                new_max = gl.maximum(row_max, sink)
                finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
                acc_scale = exp2(row_max - finite_max)
                row_sum = row_sum * acc_scale + exp2(sink - finite_max)
        empty = row_sum == 0.0
        safe_sum = gl.where(empty, 1.0, row_sum)
        if HAS_LSE:
            natural = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum)) * LN2
            gl.store(lse + (start + token).to(gl.int64) * stride_lt + head, natural, mask=valid)
        normalizer = gl.convert_layout(acc_scale / safe_sum, gl.SliceLayout(1, O_LAYOUT))
        # Rows without a visible key may have been multiplied by anything.
        seen = gl.convert_layout(row_max != float("-inf"), gl.SliceLayout(1, O_LAYOUT))
        rows = gl.where(seen[:, None], acc * normalizer[:, None], 0.0).to(DTYPE)
        token, head, valid = item_rows(
            first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS,
            gl.SliceLayout(1, STORE_LAYOUT))  # fmt: skip
        offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
        if has_query:
            stage_rows(q_tile, rows)
            store_rows(out, offsets, q_tile.load(STORE_LAYOUT), valid, DV)
            # The next queries arrive here by TMA, after the staged output has been read.
            fence_async_shared()
            mbarrier.arrive(q_empty.index(loaded % Q_STAGES), count=1)
        else:
            # Rows after the last request become 0 (M6).
            store_rows(out, offsets, gl.zeros([64, WIDTH_V], DTYPE, STORE_LAYOUT), valid, DV)

        scores = warpgroup_mma_wait(0, deps=[scores])
        if has_tiles_b:
            mbarrier.arrive(k_empty.index(step_b % STAGES), count=1)
        loaded += more
        step = step_b
        request = request_b
        start = start_b
        first_token = first_token_b
        kv_head = kv_head_b
        query_len = query_len_b
        seq_len = seq_len_b
        item_begin = item_begin_b
        begin = begin_b
        left_end = left_end_b
        right_begin = right_begin_b
        end = end_b
        last_valid = last_valid_b
        has_query = has_query_b
        has_tiles = has_tiles_b


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def range_prefill_kernel(
    key_desc, value_desc, query_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2,
    aux3, query_start_loc, seq_lens, block_table, counters, scale, soft_cap, left, right, chunk,
    num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, BOUNDS: gl.constexpr, SKIP: gl.constexpr, SHARED: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr, WIDTH: gl.constexpr,
    WIDTH_V: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    PERSISTENT: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps for each of two consumers and 1 + 1 loader warps.

    Runtime arguments, grid and constants are those of `hopper_prefill_kernel`, which has more
    constants. BOUNDS returns one range.
    """
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    FIELDS: gl.constexpr = 10
    DTYPE: gl.constexpr = key_desc.dtype
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], DTYPE)
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH], DTYPE)
    V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH_V], DTYPE)
    q_tiles = gl.allocate_shared_memory(DTYPE, [Q_STAGES * CONSUMERS, 64, WIDTH], Q_SHARED)
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, WIDTH], K_SHARED)
    v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, WIDTH_V], V_SHARED)
    mailbox, mail_full, mail_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = (
        allocate_barriers(FIELDS, STAGES, Q_STAGES, CONSUMERS, CONSUMERS + 1, 1)
    )
    gl.warp_specialize(
        [
            (_consumer, (
                out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs, concurrent,
                stride_ot, stride_oh, stride_lt, mailbox, q_tiles, k_ring, v_ring, mail_full,
                mail_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty, aux, BOUNDS, SKIP,
                0, GROUP, DV, TILE_TOKENS, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS,
                FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE)),
            (_consumer, (
                out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs, concurrent,
                stride_ot, stride_oh, stride_lt, mailbox, q_tiles, k_ring, v_ring, mail_full,
                mail_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty, aux, BOUNDS, SKIP,
                1, GROUP, DV, TILE_TOKENS, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS,
                FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE)),
            (key_loader, (
                key_desc, query_desc, query_start_loc, seq_lens, block_table, counters, left, right,
                chunk, num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks,
                stride_table, mailbox, q_tiles, k_ring, mail_full, mail_empty, q_full, q_empty,
                k_full, k_empty, aux, None, None, None, None, None, BOUNDS, 1, NUM_KV_HEADS, SHARED,
                GROUP, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, True,
                PERSISTENT, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, WIDTH, DV)),
            (value_loader, (
                value_desc, block_table, left, right, chunk, num_reqs, num_blocks, stride_table,
                mailbox, v_ring, mail_full, mail_empty, v_full, v_empty, 1, SHARED, TILE_TOKENS,
                BLOCK_N, BLOCK_SIZE, STAGES, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
