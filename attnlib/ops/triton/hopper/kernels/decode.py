"""The Hopper decode kernel: every CTA reads an equal share of the keys and values.

Work distribution (stream-K, Osama et al. 2023):

- The key tiles of all requests form one line, request after request. The line is cut into equal
  tile ranges, as many as the chip holds at a time divided by the number of KV heads. Each range has
  NUM_KV_HEADS consecutive CTAs, one per KV head, so that the heads of a page are read at about the
  same time and memory transfers cover whole pages.
- A range may contain the end of one request, several whole requests and the beginning of another.
  The tiles of one request in one range are a split. A request with one split is written directly;
  other splits are written as float32 partial results and combined (`combine.py`).
- A CTA has one consumer warpgroup (4 warps) that multiplies, one warp that loads keys and one warp
  that loads values, or four of each where they gather the rows of small blocks. The loaders run
  ahead over the borders of splits, so that memory stays busy when a new request begins.
- Over quantized caches there may be two such workers, each with ranges of its own. With tiles of 64
  keys, a worker has one warp that loads keys and values, and one warp prepares the queries of both
  where their ranges are the same, else one for each. Code that runs for every request should be
  short: with two such warps, rotations of queries cost 1% of 256 x 1k decodes and those of outputs
  1%, but both 5% (H200), probably because instructions were loaded again.

Barriers, one pair per ring stage and ring: `full` completes when the TMA loads of a stage have
delivered their bytes, or the copies of all gathering threads are complete; `empty` counts one
arrival, of the consumer, or those of its threads where a CTA has two.

The few rows of a request (query heads of a group times query tokens) are the N dimension of both
products, K @ Q^T and V^T @ P^T, because WGMMA needs M = 64 but allows N = 8.

Files: `decode_worker` has the shared memory of a worker, `decode_loader` its loaders and its range,
`decode_consumer` the consumer, which calls `decode_queries`, `decode_steps` (the first tile, the
main loop's step and the last tile of a split, with `decode_products` and `column_softmax`) and
`decode_output`.

Lengths are read on the device only, so a captured CUDA graph replays correctly with other lengths.
FlashAttention-3 and FlashInfer plan a similar distribution before the launch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.decode_call import (
    UNALIGNED,
    UNSPECIALIZED,
    Caches,
    DecodeCall,
    Outputs,
    Partials,
    Queries,
)
from attnlib.ops.triton.hopper.kernels.decode_consumer import consumer
from attnlib.ops.triton.hopper.kernels.decode_loader import first_share, loader, second_share
from attnlib.ops.triton.hopper.kernels.decode_worker import allocate_worker
from attnlib.ops.triton.hopper.kernels.query_slots import allocate_slots, query_loader
from attnlib.ops.triton.hopper.kernels.schedule import Batch, KeyTiles, Mask
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["hopper_decode_kernel"]


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_decode_kernel(
    key_desc, value_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2, aux3,
    query_start_loc, seq_lens, block_table, partials, partial_lses, split_headers, counters, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, early, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    SCORE: gl.constexpr, BOUNDS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of WORKERS consumers of 4 warps and their loaders. Grid: tile ranges * NUM_KV_HEADS
    workers, all resident at the same time.

    Args:
        key_desc, value_desc: TMA descriptors of the caches; PACKED as in `cache_tiles`, of float8
            caches as int16. With GATHERS, pointers.
        query_start_loc: None if every request has one query row.
        k_scale, v_scale: of a quantized cache, as `SCALE_KIND` of each says; else None.
        partials: float32 partial outputs, [2 * grid, rows, DV].
        partial_lses: float32 base-2 LSEs of the partial outputs, [2 * grid, rows].
        split_headers: int32 [tokens, KV heads] for `hopper_combine_kernel`; not COMBINE_IN_KERNEL.
        counters: int32 zeros, one for each CTA after the prefill's; only with COMBINE_IN_KERNEL.
        rows: query heads of a group times the largest query length.
        early: `BatchTensors.early`.
        aux0 to columns3: tensors of the score function SCORE, as in `kernels.score`; None without.
        stride_kb to stride_vh: strides of keys and values in blocks, rows and heads of what is read
            by address: of the caches in bytes with GATHERS, of the scales in the pages
            with SCALE_PER_TOKEN; else None.
        SCORE, BOUNDS: the score function and the keys that it shows, as in `kernels.score`.
        CONFIG: `DecodeConfig`.
    """
    STORED: gl.constexpr = key_desc.dtype.element_ty if CONFIG.GATHERS else key_desc.dtype
    CACHE: gl.constexpr = gl.int16 if CONFIG.K_KIND != KV_PLAIN else STORED
    aux = (
        aux0,
        rows0,
        columns0,
        aux1,
        rows1,
        columns1,
        aux2,
        rows2,
        columns2,
        aux3,
        rows3,
        columns3,
    )
    mask = Mask(
        left, right, chunk, CONFIG.CAUSAL, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.HAS_CHUNK
    )
    batch = Batch(query_start_loc, seq_lens, block_table, num_reqs, num_blocks, stride_table)
    caches = Caches(
        key_desc, value_desc, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh
    )
    call = DecodeCall(
        caches=caches,
        queries=Queries(query, stride_qt, stride_qh, num_tokens),
        outputs=Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt),
        partials=Partials(partials, partial_lses, split_headers, counters, rows),
        k_scale=k_scale,
        v_scale=v_scale,
        keys=KeyTiles(batch, mask, aux, BOUNDS, CONFIG.TILE_TOKENS, CONFIG.BLOCK_N),
        scale=scale,
        soft_cap=soft_cap,
        early=early,
        SCORE=SCORE,
        config=CONFIG,
    )
    worker0 = allocate_worker(CACHE, k_scale, v_scale, caches, CONFIG)
    if CONFIG.WORKERS == 1:
        # Of keys and of values. Warps that gather keep the addresses of rows.
        LOADER_WARPS: gl.constexpr = 4 if CONFIG.GATHERS else 1
        LOADER_REGISTERS: gl.constexpr = 112 if CONFIG.GATHERS else 48
        # Makes the initialized barriers visible to TMA.
        fence_async_shared()
        gl.warp_specialize(
            [
                (consumer, (call, worker0, None)),
                (loader, (call, worker0, None, "keys")),
                (loader, (call, worker0, None, "values")),
            ],
            [LOADER_WARPS, LOADER_WARPS],
            [LOADER_REGISTERS, LOADER_REGISTERS],
        )
    else:
        share0 = first_share(call)
        share1 = second_share(call, share0)
        worker1 = allocate_worker(CACHE, k_scale, v_scale, caches, CONFIG)
        # Registers per thread of the second consumer, and of the loader warps.
        SECOND_REGISTERS: gl.constexpr = 200 if CONFIG.QUERY_WARP else 216
        REGISTERS: gl.constexpr = 80 if CONFIG.QUERY_WARP else 48
        if not CONFIG.QUERY_WARP:
            fence_async_shared()
            gl.warp_specialize(
                [
                    (consumer, (call, worker0, share0)),
                    (consumer, (call, worker1, share1)),
                    (loader, (call, worker0, share0, "keys")),
                    (loader, (call, worker0, share0, "values")),
                    (loader, (call, worker1, share1, "keys")),
                    (loader, (call, worker1, share1, "values")),
                ],
                [4, 1, 1, 1, 1],
                [SECOND_REGISTERS, REGISTERS, REGISTERS, REGISTERS, REGISTERS],
            )
        else:
            slots = allocate_slots(CONFIG)
            worker0 = worker0.with_slots(slots, 0)
            worker1 = worker1.with_slots(slots, 1)
            fence_async_shared()
            if CONFIG.NUM_KV_HEADS % 2 == 0:
                gl.warp_specialize(
                    [
                        (consumer, (call, worker0, share0)),
                        (consumer, (call, worker1, share1)),
                        (loader, (call, worker0, share0, "keys and values")),
                        (loader, (call, worker1, share1, "keys and values")),
                        (query_loader, (call, slots, share0, 0, 2)),
                    ],
                    [4, 1, 1, 1],
                    [SECOND_REGISTERS, REGISTERS, REGISTERS, REGISTERS],
                )
            else:
                gl.warp_specialize(
                    [
                        (consumer, (call, worker0, share0)),
                        (consumer, (call, worker1, share1)),
                        (loader, (call, worker0, share0, "keys and values")),
                        (loader, (call, worker1, share1, "keys and values")),
                        (query_loader, (call, slots, share0, 0, 1)),
                        (query_loader, (call, slots, share1, 1, 1)),
                    ],
                    [4, 1, 1, 1, 1],
                    [SECOND_REGISTERS, REGISTERS, REGISTERS, REGISTERS, REGISTERS],
                )
