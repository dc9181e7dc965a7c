"""Queries, keys, values and outputs as chunks of a head.

A program owns BLOCK_M rows. A row is one query head of one query token. The heads of a KV head's
group are adjacent (GQA packing), so that all of them use a tile of keys and values once it is
loaded.

A head size that is not a power of two is cut in two powers of two (96 = 64 + 32), which wastes
less than padding to the next one. Names that end in 0 and 1 denote the two chunks; a second chunk
of size 0 does not exist.

LATENT: the values are the first DV elements of the keys (P10). The chunks of a key are then its
values and the rest, and the tile of values is the first chunk, which is loaded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.quant import decode_kv

__all__ = [
    "add_chunks",
    "aligned",
    "load_blocks",
    "load_chunk_queries",
    "load_queries",
    "multiply_chunks",
    "pack_rows",
    "query_powers",
    "scale_rows",
    "store_chunks",
    "store_rows",
]


@triton.jit
def aligned(offset, VEC: tl.constexpr):
    """Return an offset that the launcher has checked, marked as a multiple of VEC elements."""
    # Shifting the low bits out and back tells the compiler. A hint (`tl.multiple_of`) does not
    # survive inlining.
    if VEC == 16:
        offset = (offset >> 4) << 4
    elif VEC == 8:
        offset = (offset >> 3) << 3
    elif VEC == 4:
        offset = (offset >> 2) << 2
    return offset


@triton.jit
def pack_rows(first_token, query_len, head_offset, CONFIG: tl.constexpr):
    """Return (token in the request, head in the group, whether the row exists) of each row."""
    rows = tl.arange(0, CONFIG.BLOCK_M)
    token = first_token + rows // CONFIG.TILE_HEADS
    head = head_offset + rows % CONFIG.TILE_HEADS
    exists = rows < CONFIG.TILE_TOKENS * CONFIG.TILE_HEADS
    return token, head, exists & (token < query_len) & (head < CONFIG.GROUP)


@triton.jit
def query_powers(largest):
    """Return (power, 1 / power) that bring rows of these largest magnitudes into float16's range.

    The power is 1 for rows with infinities or NaN. The Hopper kernels have the same function in
    Gluon (`hopper/kernels/quantized.py`), which cannot call this one.
    """
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    exponent = tl.where(exponent == 255, 141, tl.maximum(exponent, 15))
    power = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return power, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_rows(qk_scale, row_factors):
    """Return the scale of the products: a number, or one of each row [BLOCK_M].

    `row_factors` is a result of `load_queries`.
    """
    if len(row_factors.shape) == 1:
        qk_scale = qk_scale * row_factors
        # Not 0: the product of 0 and a hidden score, -inf, is NaN. Other scales keep their sign.
        qk_scale = tl.where(tl.abs(qk_scale) < 2.0**-105, 2.0**-105, qk_scale)
    return qk_scale


@triton.jit
def _load_query_chunk(
    query,
    offsets,
    valid,
    SIZE: tl.constexpr,
    START: tl.constexpr,
    CHUNK: tl.constexpr,
    VEC: tl.constexpr,
):
    """Load rows of queries [BLOCK_M, CHUNK] from element START on; 0 where there are none."""
    lanes = START + tl.arange(0, CHUNK)
    offsets = aligned(offsets, VEC)
    return tl.load(
        query + offsets[:, None] + lanes[None, :],
        mask=valid[:, None] & (lanes < SIZE)[None, :],
        other=0.0,
    )


@triton.jit
def load_queries(query, offsets, valid, CONFIG: tl.constexpr):
    """Load rows of queries as COMPUTE, in the chunks of the keys.

    float16 has a smaller range than bfloat16: where it replaces bfloat16 (over a float8 cache),
    each row is multiplied by a power of two. Rows and elements that do not exist are 0.

    Returns:
        (chunk [BLOCK_M, D0], chunk [BLOCK_M, D1] if D1 is above 0, factors of the products for
        `scale_rows`: those of the rows [BLOCK_M], or 1).
    """
    COMPUTE: tl.constexpr = CONFIG.COMPUTE
    END0: tl.constexpr = CONFIG.DV if CONFIG.LATENT else CONFIG.D
    START1: tl.constexpr = CONFIG.DV if CONFIG.LATENT else CONFIG.D0
    q0 = _load_query_chunk(query, offsets, valid, END0, 0, CONFIG.D0, CONFIG.VEC_Q)
    q1 = q0
    if CONFIG.D1 > 0:
        q1 = _load_query_chunk(query, offsets, valid, CONFIG.D, START1, CONFIG.D1, CONFIG.VEC_Q)
    row_factors = tl.full([], 1.0, tl.float32)
    if (COMPUTE == tl.float16) and (q0.dtype != tl.float16):
        q0 = q0.to(tl.float32)
        q1 = q1.to(tl.float32)
        largest = tl.max(tl.abs(q0), 1)
        if CONFIG.D1 > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(q1), 1))
        power, row_factors = query_powers(largest)
        q0 *= power[:, None]
        q1 *= power[:, None]
    return q0.to(COMPUTE), q1.to(COMPUTE), row_factors


@triton.jit
def load_chunk_queries(query, offsets, valid, CONFIG: tl.constexpr):
    """`load_queries`; returns (chunks, factors of the products)."""
    q0, q1, row_factors = load_queries(query, offsets, valid, CONFIG)
    return (q0, q1), row_factors


@triton.jit
def load_blocks(table, start, first, last, CONFIG: tl.constexpr):
    """Load the physical blocks of the key tile at `start`.

    One block per key, or a single one if a tile never crosses a block border. Entries of keys
    outside [first, last) are not read (P3).
    """
    if CONFIG.PAGED:
        if CONFIG.BLOCK_SIZE % CONFIG.BLOCK_N == 0:
            blocks = tl.load(table + start // CONFIG.BLOCK_SIZE, mask=start < last, other=0)
        else:
            keys = start + tl.arange(0, CONFIG.BLOCK_N)
            inside = (keys >= first) & (keys < last)
            # Unsigned, because positions are not negative: the division is then a shift.
            columns = (keys.to(tl.uint32) // CONFIG.BLOCK_SIZE).to(tl.int32)
            blocks = tl.load(table + columns, mask=inside, other=0)
    else:
        blocks = 0
    return blocks


@triton.jit
def key_offsets(blocks, start, stride_block, stride_key, VEC: tl.constexpr, CONFIG: tl.constexpr):
    """Return the element offsets [BLOCK_N] of a tile's keys, in 64 bits (P6)."""
    # Factors are widened directly before the multiplication: a product of two widened 32-bit
    # numbers is one instruction.
    lanes = tl.arange(0, CONFIG.BLOCK_N)
    if CONFIG.PAGED:
        if CONFIG.BLOCK_SIZE % CONFIG.BLOCK_N == 0:
            within = start % CONFIG.BLOCK_SIZE + lanes
        else:
            within = ((start + lanes).to(tl.uint32) % CONFIG.BLOCK_SIZE).to(tl.int32)
        offsets = blocks.to(tl.int64) * stride_block + within.to(tl.int64) * stride_key
    else:
        offsets = (start + lanes).to(tl.int64) * stride_key
    return aligned(offsets, VEC)


@triton.jit
def load_chunk(
    base,
    offsets,
    inside,
    SIZE: tl.constexpr,
    START: tl.constexpr,
    CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load [BLOCK_N, CHUNK] of keys or values.

    Masked tiles read nothing outside the visible keys and hold 0 there (P5).
    """
    lanes = START + tl.arange(0, CHUNK)
    pointers = base + offsets[:, None] + lanes[None, :]
    if MASKED and START + CHUNK > SIZE:
        tile = tl.load(pointers, mask=inside[:, None] & (lanes < SIZE)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=inside[:, None], other=0.0)
    elif START + CHUNK > SIZE:
        tile = tl.load(pointers, mask=(lanes < SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def multiply_chunks(queries, key, offsets, inside, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    """Return (products [BLOCK_M, BLOCK_N] of queries and keys, first chunk of the keys)."""
    END0: tl.constexpr = CONFIG.DV if CONFIG.LATENT else CONFIG.D
    START1: tl.constexpr = CONFIG.DV if CONFIG.LATENT else CONFIG.D0
    k0 = load_chunk(key, offsets, inside, END0, 0, CONFIG.D0, MASKED)
    k0 = decode_kv(k0, CONFIG.KV_KIND, CONFIG.COMPUTE)
    qk = tl.dot(queries[0], tl.trans(k0), input_precision="ieee")
    if CONFIG.D1 > 0:
        k1 = load_chunk(key, offsets, inside, CONFIG.D, START1, CONFIG.D1, MASKED)
        k1 = decode_kv(k1, CONFIG.KV_KIND, CONFIG.COMPUTE)
        qk = tl.dot(queries[1], tl.trans(k1), qk, input_precision="ieee")
    return qk, k0


@triton.jit
def add_chunks(
    sums, weights, acc_scale, k0, value, offsets, inside, MASKED: tl.constexpr, CONFIG: tl.constexpr
):
    """Return the sums of values with those of a tile, by its weights in COMPUTE. `k0` is the first
    chunk of the keys, which holds the values of latents."""
    acc0, acc1 = sums
    v0 = k0
    if not CONFIG.LATENT:
        v0 = load_chunk(value, offsets, inside, CONFIG.DV, 0, CONFIG.DV0, MASKED)
        v0 = decode_kv(v0, CONFIG.KV_KIND, CONFIG.COMPUTE)
    acc0 = tl.dot(weights, v0, acc0 * acc_scale[:, None], input_precision="ieee")
    if CONFIG.DV1 > 0:
        v1 = load_chunk(value, offsets, inside, CONFIG.DV, CONFIG.DV0, CONFIG.DV1, MASKED)
        v1 = decode_kv(v1, CONFIG.KV_KIND, CONFIG.COMPUTE)
        acc1 = tl.dot(weights, v1, acc1 * acc_scale[:, None], input_precision="ieee")
    return acc0, acc1


@triton.jit
def empty_chunks(CONFIG: tl.constexpr):
    """Return sums of no values: two chunks, the second of one column where it does not exist."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    DV0: tl.constexpr = CONFIG.DV0
    WIDTH1: tl.constexpr = CONFIG.DV1 if CONFIG.DV1 > 0 else 1
    acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, WIDTH1], tl.float32)
    return acc0, acc1


@triton.jit
def store_rows(
    out,
    offsets,
    acc,
    factor,
    valid,
    SIZE: tl.constexpr,
    START: tl.constexpr,
    CHUNK: tl.constexpr,
    VEC: tl.constexpr,
):
    """Store one chunk of the outputs, `acc * factor` row by row."""
    lanes = START + tl.arange(0, CHUNK)
    offsets = aligned(offsets, VEC)
    mask = valid[:, None] & (lanes < SIZE)[None, :]
    tl.store(
        out + offsets[:, None] + lanes[None, :],
        (acc * factor[:, None]).to(out.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def store_chunks(out, offsets, sums, factor, valid, VEC: tl.constexpr, CONFIG: tl.constexpr):
    """Store `sums * factor` row by row."""
    acc0, acc1 = sums
    DV: tl.constexpr = CONFIG.DV
    store_rows(out, offsets, acc0, factor, valid, DV, 0, CONFIG.DV0, VEC)
    if CONFIG.DV1 > 0:
        store_rows(out, offsets, acc1, factor, valid, DV, CONFIG.DV0, CONFIG.DV1, VEC)
