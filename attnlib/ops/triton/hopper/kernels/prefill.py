"""The Hopper prefill kernel: 2 or 3 consumer warpgroups, one warp that loads keys, one for values.

A work tile is 64 query rows per consumer warpgroup and one KV head. A row is one query head of one
query token. The heads of a group are adjacent, so they share the same tiles of keys and values.

| file | part |
|---|---|
| `prefill_call` | constants, batch, scores |
| `prefill_storage`, `ring`, `mailbox` | shared memory, barriers, published work tiles |
| `prefill_loader`, `prefill_sources` | selection of work tiles; loads of queries, keys, values |
| `prefill_consumer`, `prefill_queries`, `prefill_visits` | consumers, their rows and key tiles |
| `mainloop`, `prefill_products`, `two_accumulators`, `tile_weights`, `softmax` | one step |
| `prefill_epilogue`, `prefill_rows` | sums, sinks, LSEs, stores |

With `concurrent` the kernel starts while the previous one runs, on the multiprocessors that the
previous one leaves free, and waits for it at its own end. The prefills of a mixed batch run next to
its decodes this way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import reinterpret
from attnlib.ops.triton.hopper.kernels.converter import converter
from attnlib.ops.triton.hopper.kernels.decode_call import Outputs, Queries
from attnlib.ops.triton.hopper.kernels.gather import GATHER_THREADS
from attnlib.ops.triton.hopper.kernels.key_splits import key_splits
from attnlib.ops.triton.hopper.kernels.prefill_call import (
    UNALIGNED,
    UNSPECIALIZED,
    PrefillCall,
    Scoring,
    mask_of,
)
from attnlib.ops.triton.hopper.kernels.prefill_consumer import consumer
from attnlib.ops.triton.hopper.kernels.prefill_loader import key_loader, value_loader
from attnlib.ops.triton.hopper.kernels.prefill_sources import CacheSource, GatherSource
from attnlib.ops.triton.hopper.kernels.prefill_storage import (
    PrefillStorage,
    allocate_storage,
    allocate_tiles,
)
from attnlib.ops.triton.hopper.kernels.ring import ring_pair
from attnlib.ops.triton.hopper.kernels.schedule import Batch
from attnlib.ops.triton.hopper.kernels.slopes import column_numbers
from attnlib.ops.triton.hopper.kernels.two_accumulators import (
    LOADED_PARTS,
    PART_COLUMNS,
    SPARE_PARTS,
)
from attnlib.ops.triton.hopper.kernels.value_columns import (
    PART_ELEMENTS,
    PART_KEYS,
    check_offset,
    shared_memory_offset,
    store_ones,
)
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["hopper_prefill_kernel"]

_GATHER_THREADS = gl.constexpr(GATHER_THREADS)


@gluon.jit
def _allocate(CONFIG: gl.constexpr, QUERY: gl.constexpr, COMPUTE: gl.constexpr):
    """Return the `PrefillStorage` of tiles that products read."""
    STAGES: gl.constexpr = CONFIG.STAGES
    BLOCKS: gl.constexpr = 1 if CONFIG.SPLIT_V else CONFIG.CONSUMERS
    q_tiles = allocate_tiles(QUERY, CONFIG.Q_STAGES * BLOCKS * CONFIG.KEY_PARTS, 64, CONFIG.WIDTH)
    k_tiles = allocate_tiles(COMPUTE, STAGES * CONFIG.KEY_PARTS, CONFIG.BLOCK_N, CONFIG.WIDTH)
    if CONFIG.VALUE_PARTS > 0:
        SPARE: gl.constexpr = _spare_parts(CONFIG.VALUE_PARTS, CONFIG.HAS_LSE or CONFIG.SPLIT)
        v_tiles = allocate_tiles(
            COMPUTE, STAGES * (CONFIG.VALUE_PARTS + SPARE), PART_KEYS, PART_ELEMENTS
        )
        check_offset(
            v_tiles,
            shared_memory_offset((2 * q_tiles.numel, 2 * k_tiles.numel), 2 * v_tiles.numel),
        )
        if SPARE > 0:
            store_ones(v_tiles, CONFIG.VALUE_PARTS, STAGES)
    elif CONFIG.REST_COLUMNS > 0:
        v_tiles = allocate_tiles(
            COMPUTE, STAGES * (LOADED_PARTS + SPARE_PARTS), CONFIG.BLOCK_N, PART_COLUMNS
        )
    else:
        v_tiles = allocate_tiles(COMPUTE, STAGES, CONFIG.BLOCK_N, CONFIG.WIDTH_V)
    # Divided queries take too much shared memory for two stages. A consumer that releases its rows
    # alone, before its last product, waits less for the next ones.
    OWN_QUERIES: gl.constexpr = (
        CONFIG.KEY_PARTS == 3
        and (CONFIG.CONSUMERS == 3 or CONFIG.REST_COLUMNS > 0)
        and CONFIG.LOAD_QUERY
        and not CONFIG.STAGED_STORE
    )
    CONVERTERS: gl.constexpr = int(CONFIG.KV_KIND != KV_PLAIN)
    READERS: gl.constexpr = CONFIG.CONSUMERS + 1 + CONVERTERS - int(CONFIG.GATHERS)
    LOADERS: gl.constexpr = _GATHER_THREADS if CONFIG.GATHERS else 1
    return allocate_storage(q_tiles, k_tiles, v_tiles, CONFIG, READERS, LOADERS, OWN_QUERIES)


@gluon.constexpr_function
def _spare_parts(parts, has_lse):
    """Return the parts of ones in a stage of values, whose products are the sums of weights."""
    return 1 if parts < 4 and not has_lse else 0


@gluon.jit
def _float8_partitions(
    call, scoring, queries, outputs, storage, key_desc, value_desc, query_desc, CACHE: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Run the partitions over a float8 cache: two consumers, a converter, the loaders.

    The loaders fill rings of bytes, from which the converter fills the rings of the products.
    """
    KV_STAGES: gl.constexpr = CONFIG.BYTE_STAGES
    H_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, CONFIG.WIDTH], gl.float16)
    q_tiles = storage.queries.ring.memory
    Q_SHAPE: gl.constexpr = [CONFIG.Q_STAGES * CONFIG.CONSUMERS, 64, CONFIG.WIDTH]
    q_halves = reinterpret(q_tiles, gl.float16, Q_SHAPE, H_SHARED)
    k_bytes = allocate_tiles(CACHE, KV_STAGES, CONFIG.BLOCK_N, CONFIG.WIDTH // 2)
    v_bytes = allocate_tiles(CACHE, KV_STAGES, CONFIG.BLOCK_N, CONFIG.WIDTH_V // 2)
    keys, values = ring_pair(k_bytes, v_bytes, KV_STAGES)
    fence_async_shared()
    stored = PrefillStorage(storage.mailbox, storage.queries, keys, values)
    gl.warp_specialize(
        [
            (consumer, (call, scoring, queries, outputs, storage, q_halves, 0)),
            (consumer, (call, scoring, queries, outputs, storage, q_halves, 1)),
            (converter, (call, stored, storage)),
            (key_loader, (call, stored, CacheSource(key_desc, 1, 0), query_desc)),
            (value_loader, (call, stored, CacheSource(value_desc, 1, 0))),
        ],
        [4, CONFIG.CONVERTER_WARPS, 1, 1],
        [
            CONFIG.CONSUMER_REGISTERS, CONFIG.CONVERTER_REGISTERS, CONFIG.PRODUCER_REGISTERS,
            CONFIG.PRODUCER_REGISTERS,
        ],
    )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_prefill_kernel(
    key_desc, value_desc, query_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2,
    aux3, query_start_loc, seq_lens, block_table, counters, scale, soft_cap, left, right, chunk,
    num_reqs, num_tokens, num_tiles, concurrent, l2_heads, num_blocks, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    partials, num_splits,
    SCORE: gl.constexpr, KEY_SLOPE: gl.constexpr, BOUNDS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps per consumer and 1 + 1 loader warps.

    Grid: num_tiles * NUM_KV_HEADS CTAs, with SPLIT times `num_splits`, or fewer with PERSISTENT.

    Args:
        key_desc, value_desc: TMA descriptors of the caches; of float8 ones as int16. With GATHERS
            pointers.
        k_scale, v_scale: of a float8 cache or its 16-bit copies, as `SCALE_KIND` of each says; else
            None. A `k_scale` of copies is a tensor: numbers are part of `scale`.
        query_desc: TMA descriptor of the queries; only with LOAD_QUERY.
        seq_lens, block_table: with BLOCK_SIZE 0, which stands for keys without pages, the first row
            of each request's keys (the row after the last key at the end); the caches are
            [1, rows, Hkv, D].
        counters, num_tiles, concurrent, l2_heads: fields of `PrefillCall`.
        aux0 to columns3: tensors of SCORE with their sizes (`kernels.score`); None without.
        stride_kb to stride_vh: with GATHERS, strides of the key and the value cache in blocks, rows
            and heads, in bytes; else None.
        partials, num_splits: memory and number of `KeySplits`; None without SPLIT.
        SCORE, KEY_SLOPE: fields of `Scoring`.
        BOUNDS: field of `PrefillCall`.
        CONFIG: `PrefillConfig`.
    """
    aux = (
        aux0, rows0, columns0, aux1, rows1, columns1, aux2, rows2, columns2, aux3, rows3, columns3,
    )  # fmt: skip
    QUERY: gl.constexpr = query.dtype.element_ty
    CACHE: gl.constexpr = key_desc.dtype.element_ty if CONFIG.GATHERS else key_desc.dtype
    COMPUTE: gl.constexpr = CACHE if CONFIG.KV_KIND == KV_PLAIN else gl.float16
    storage = _allocate(CONFIG, QUERY, COMPUTE)
    column_tile = column_numbers(CONFIG.BLOCK_N) if KEY_SLOPE is not None else None
    scoring = Scoring(scale, soft_cap, k_scale, v_scale, SCORE, KEY_SLOPE, column_tile)
    queries = Queries(query, stride_qt, stride_qh, num_tokens)
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    splits = key_splits(partials, num_splits, num_tokens, CONFIG) if CONFIG.SPLIT else None
    call = PrefillCall(
        Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table),
        num_tokens, num_tiles, l2_heads, counters, concurrent, mask_of(left, right, chunk, CONFIG),
        aux, BOUNDS, splits, CONFIG,
    )  # fmt: skip
    PRODUCERS: gl.constexpr = CONFIG.PRODUCER_REGISTERS
    SPARE: gl.constexpr = (
        _spare_parts(CONFIG.VALUE_PARTS, CONFIG.HAS_LSE or CONFIG.SPLIT)
        if CONFIG.VALUE_PARTS > 0
        else 0
    )
    keys = CacheSource(key_desc, CONFIG.KEY_PARTS, 0)
    if CONFIG.REST_COLUMNS > 0:
        values = CacheSource(value_desc, LOADED_PARTS, SPARE_PARTS)
    else:
        values = CacheSource(value_desc, max(CONFIG.VALUE_PARTS, 1), SPARE)
    if CONFIG.KV_KIND != KV_PLAIN:
        _float8_partitions(
            call, scoring, queries, outputs, storage, key_desc, value_desc, query_desc, CACHE,
            CONFIG,
        )  # fmt: skip
    elif CONFIG.CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consumer, (call, scoring, queries, outputs, storage, None, 0)),
                (consumer, (call, scoring, queries, outputs, storage, None, 1)),
                (consumer, (call, scoring, queries, outputs, storage, None, 2)),
                (key_loader, (call, storage, keys, query_desc)),
                (value_loader, (call, storage, values)),
            ],
            [4, 4, 1, 1],
            [CONFIG.CONSUMER_REGISTERS, CONFIG.CONSUMER_REGISTERS, PRODUCERS, PRODUCERS],
        )
    elif CONFIG.GATHERS:
        rows = GatherSource(
            key_desc, value_desc, (stride_kb, stride_kn, stride_kh),
            (stride_vb, stride_vn, stride_vh), storage.values,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (consumer, (call, scoring, queries, outputs, storage, None, 0)),
                (consumer, (call, scoring, queries, outputs, storage, None, 1)),
                (key_loader, (call, storage, rows, query_desc)),
            ],
            [4, 4],
            [CONFIG.CONSUMER_REGISTERS, PRODUCERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (call, scoring, queries, outputs, storage, None, 0)),
                (consumer, (call, scoring, queries, outputs, storage, None, 1)),
                (key_loader, (call, storage, keys, query_desc)),
                (value_loader, (call, storage, values)),
            ],
            [4, 1, 1],
            [CONFIG.CONSUMER_REGISTERS, PRODUCERS, PRODUCERS],
        )
