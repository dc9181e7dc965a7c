"""Queries, keys, values and outputs as parts of a head, for pages that hold their scales (M16).

In place of two chunks of a head size (`chunks`) there are two or four parts of a head, by the
formats (`page_formats`) of the keys and of the values, and scales per token: those of the keys
multiply the scores, those of the values the weights; those of 4-bit floats multiply the elements.

Sums of values are in units of the largest scale of the values so far, which is their last element:
weights times scales are then at most 1, and in the range of float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.arguments import Cache
from attnlib.ops.triton.kernels.chunks import aligned, query_powers
from attnlib.ops.triton.kernels.number_tables import code_of_keys, code_of_values, open_tables
from attnlib.ops.triton.kernels.page_formats import (
    PAGE_INT4,
    PAGE_NVFP4,
    PAGE_OPEN4,
    element_step,
    first_element,
    load_element_scales,
    load_scales,
    load_words,
    scale_of_part,
    scaled,
    unpack,
)

__all__ = [
    "add_parts",
    "empty_parts",
    "load_part_queries",
    "multiply_parts",
    "open_pages",
    "store_parts",
]


@triton.jit
def open_pages(cache, kv_head, table, CONFIG: tl.constexpr):
    """Return the cache of one KV head: pointers to 16-bit words and to scales, and their strides.
    Stores the tables of open formats.

    Scales are numbers, four float16 as an int64, or bytes.
    """
    KIND: tl.constexpr = CONFIG.PAGE_KIND
    V_KIND: tl.constexpr = CONFIG.V_PAGE_KIND
    K_PER_SCALE: tl.constexpr = 4 if KIND == PAGE_INT4 else 1
    V_PER_SCALE: tl.constexpr = 4 if V_KIND == PAGE_INT4 else 1
    kv_head64 = kv_head.to(tl.int64)
    WORD: tl.constexpr = tl.pointer_type(tl.uint16)
    key = (cache.key + aligned(kv_head64 * cache.stride_kh, 2 * CONFIG.VEC_K)).to(WORD)
    value = (cache.value + aligned(kv_head64 * cache.stride_vh, 2 * CONFIG.VEC_V)).to(WORD)
    k_scale = cache.k_scale + kv_head64 * cache.stride_ksh
    v_scale = cache.v_scale + kv_head64 * cache.stride_vsh
    if KIND == PAGE_INT4:
        k_scale = k_scale.to(tl.pointer_type(tl.int64))
    elif KIND >= PAGE_NVFP4:
        k_scale = k_scale.to(tl.pointer_type(tl.uint8))
    if V_KIND == PAGE_INT4:
        v_scale = v_scale.to(tl.pointer_type(tl.int64))
    elif V_KIND >= PAGE_NVFP4:
        v_scale = v_scale.to(tl.pointer_type(tl.uint8))
    open_tables(kv_head, CONFIG)
    return Cache(
        key,
        value,
        table,
        cache.stride_table,
        cache.stride_kb // 2,
        cache.stride_kn // 2,
        cache.stride_kh,
        cache.stride_vb // 2,
        cache.stride_vn // 2,
        cache.stride_vh,
        k_scale,
        v_scale,
        cache.stride_ksb // K_PER_SCALE,
        cache.stride_ksn // K_PER_SCALE,
        cache.stride_ksh,
        cache.stride_vsb // V_PER_SCALE,
        cache.stride_vsn // V_PER_SCALE,
        cache.stride_vsh,
    )


@triton.jit
def _load_part(query, offsets, valid, PART: tl.constexpr, CONFIG: tl.constexpr):
    """Load the elements of one part of queries, [BLOCK_M, WORDS_PAD]; 0 where there are none."""
    lanes = tl.arange(0, CONFIG.WORDS_PAD)
    FIRST: tl.constexpr = first_element(PART, CONFIG.WORDS, CONFIG.PAGE_KIND)
    elements = FIRST + lanes * element_step(CONFIG.PAGE_KIND)
    mask = valid[:, None] & (lanes < CONFIG.WORDS)[None, :]
    return tl.load(query + offsets[:, None] + elements[None, :], mask=mask, other=0.0)


@triton.jit
def load_part_queries(query, offsets, valid, CONFIG: tl.constexpr):
    """Load the parts of queries as COMPUTE, with powers of two for float16 as `load_queries` does.

    Returns:
        (parts, of which 8-bit formats use two; factors of the products for `scale_rows`).
    """
    COMPUTE: tl.constexpr = CONFIG.COMPUTE
    q0 = _load_part(query, offsets, valid, 0, CONFIG)
    q1 = _load_part(query, offsets, valid, 1, CONFIG)
    q2 = q0
    q3 = q1
    if CONFIG.PAGE_KIND >= PAGE_INT4:
        q2 = _load_part(query, offsets, valid, 2, CONFIG)
        q3 = _load_part(query, offsets, valid, 3, CONFIG)
    row_factors = tl.full([], 1.0, tl.float32)
    if (COMPUTE == tl.float16) and (q0.dtype != tl.float16):
        q0 = q0.to(tl.float32)
        q1 = q1.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(q0), 1), tl.max(tl.abs(q1), 1))
        if CONFIG.PAGE_KIND >= PAGE_INT4:
            q2 = q2.to(tl.float32)
            q3 = q3.to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(q2), 1))
            largest = tl.maximum(largest, tl.max(tl.abs(q3), 1))
        power, row_factors = query_powers(largest)
        q0 *= power[:, None]
        q1 *= power[:, None]
        q2 *= power[:, None]
        q3 *= power[:, None]
    return (q0.to(COMPUTE), q1.to(COMPUTE), q2.to(COMPUTE), q3.to(COMPUTE)), row_factors


@triton.jit
def _token_offsets(
    blocks, start, stride_block, stride_key, VEC: tl.constexpr, CONFIG: tl.constexpr
):
    """Return the offsets [BLOCK_N] of a tile's tokens, in 64 bits (P6)."""
    lanes = tl.arange(0, CONFIG.BLOCK_N)
    if CONFIG.BLOCK_SIZE % CONFIG.BLOCK_N == 0:
        within = start % CONFIG.BLOCK_SIZE + lanes
    else:
        within = ((start + lanes).to(tl.uint32) % CONFIG.BLOCK_SIZE).to(tl.int32)
    return aligned(blocks.to(tl.int64) * stride_block + within.to(tl.int64) * stride_key, VEC)


@triton.jit
def _scaled_parts(parts, factors, COMPUTE: tl.constexpr):
    """Return four parts of 4-bit floats times the scales of their words."""
    x0 = scaled(parts[0], factors, COMPUTE)
    x1 = scaled(parts[1], factors, COMPUTE)
    x2 = scaled(parts[2], factors, COMPUTE)
    x3 = scaled(parts[3], factors, COMPUTE)
    return x0, x1, x2, x3


@triton.jit
def multiply_parts(
    queries, cache, blocks, start, inside, MASKED: tl.constexpr, CONFIG: tl.constexpr
):
    """Return the products [BLOCK_M, BLOCK_N] of queries and the keys of a tile."""
    KIND: tl.constexpr = CONFIG.PAGE_KIND
    COMPUTE: tl.constexpr = CONFIG.COMPUTE
    NUMBER: tl.constexpr = code_of_keys(CONFIG.NUMBER, CONFIG.V_NUMBER, CONFIG.PTX)
    q0, q1, q2, q3 = queries
    offsets = _token_offsets(blocks, start, cache.stride_kb, cache.stride_kn, CONFIG.VEC_K, CONFIG)
    words = load_words(cache.key, offsets, inside, CONFIG.WORDS, CONFIG.WORDS_PAD, MASKED)
    offsets = _token_offsets(blocks, start, cache.stride_ksb, cache.stride_ksn, 1, CONFIG)
    k0, k1, k2, k3 = unpack(words, KIND, COMPUTE, CONFIG.PTX, NUMBER)
    if KIND >= PAGE_NVFP4:
        factors = load_element_scales(
            cache.k_scale, offsets, inside, CONFIG.WORDS, CONFIG.WORDS_PAD, KIND, MASKED
        )
        k0, k1, k2, k3 = _scaled_parts((k0, k1, k2, k3), factors, COMPUTE)
        qk = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        qk = tl.dot(q1, tl.trans(k1), qk, input_precision="ieee")
        qk = tl.dot(q2, tl.trans(k2), qk, input_precision="ieee")
        qk = tl.dot(q3, tl.trans(k3), qk, input_precision="ieee")
    else:
        scales = load_scales(cache.k_scale, offsets, inside, MASKED)
        qk = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if KIND == PAGE_INT4:
            qk *= scale_of_part(scales, 0, KIND)[None, :]
            product = tl.dot(q1, tl.trans(k1), input_precision="ieee")
            qk += product * scale_of_part(scales, 1, KIND)[None, :]
            product = tl.dot(q2, tl.trans(k2), input_precision="ieee")
            qk += product * scale_of_part(scales, 2, KIND)[None, :]
            product = tl.dot(q3, tl.trans(k3), input_precision="ieee")
            qk += product * scale_of_part(scales, 3, KIND)[None, :]
        else:
            qk = tl.dot(q1, tl.trans(k1), qk, input_precision="ieee")
            if KIND == PAGE_OPEN4:
                qk = tl.dot(q2, tl.trans(k2), qk, input_precision="ieee")
                qk = tl.dot(q3, tl.trans(k3), qk, input_precision="ieee")
            qk *= scale_of_part(scales, 0, KIND)[None, :]
    return qk


@triton.jit
def _largest_scale(scales, KIND: tl.constexpr):
    """Return the largest scale of a tile's values."""
    largest = scale_of_part(scales, 0, KIND)
    if KIND == PAGE_INT4:
        largest = tl.maximum(largest, scale_of_part(scales, 1, KIND))
        largest = tl.maximum(largest, scale_of_part(scales, 2, KIND))
        largest = tl.maximum(largest, scale_of_part(scales, 3, KIND))
    return tl.max(largest, 0)


@triton.jit
def _weigh(weights, scales, inverse, v, acc, acc_scale, PART: tl.constexpr, CONFIG: tl.constexpr):
    """Add the weighted values of one part to its accumulator."""
    p = weights
    if CONFIG.V_PAGE_KIND < PAGE_NVFP4:
        p = weights * (scale_of_part(scales, PART, CONFIG.V_PAGE_KIND) * inverse)[None, :]
    return tl.dot(p.to(CONFIG.COMPUTE), v, acc * acc_scale[:, None], input_precision="ieee")


@triton.jit
def add_parts(
    sums, weights, acc_scale, cache, blocks, start, inside, MASKED: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Return the sums of values, and their unit, with those of a tile, by its weights."""
    KIND: tl.constexpr = CONFIG.V_PAGE_KIND
    NUMBER: tl.constexpr = code_of_values(CONFIG.NUMBER, CONFIG.V_NUMBER, CONFIG.PTX)
    acc0, acc1, acc2, acc3, unit = sums
    offsets = _token_offsets(blocks, start, cache.stride_vb, cache.stride_vn, CONFIG.VEC_V, CONFIG)
    words = load_words(cache.value, offsets, inside, CONFIG.DV_WORDS, CONFIG.DV_PAD, MASKED)
    offsets = _token_offsets(blocks, start, cache.stride_vsb, cache.stride_vsn, 1, CONFIG)
    v0, v1, v2, v3 = unpack(words, KIND, CONFIG.COMPUTE, CONFIG.PTX, NUMBER)
    if KIND >= PAGE_NVFP4:
        factors = load_element_scales(
            cache.v_scale, offsets, inside, CONFIG.DV_WORDS, CONFIG.DV_PAD, KIND, MASKED
        )
        v0, v1, v2, v3 = _scaled_parts((v0, v1, v2, v3), factors, CONFIG.COMPUTE)
        scales = 0.0
        inverse = 1.0
        new_unit = unit
    else:
        scales = load_scales(cache.v_scale, offsets, inside, MASKED)
        new_unit = tl.maximum(unit, _largest_scale(scales, KIND))
        inverse = 1.0 / tl.where(new_unit > 0.0, new_unit, 1.0)
        acc_scale *= unit * inverse
    acc0 = _weigh(weights, scales, inverse, v0, acc0, acc_scale, 0, CONFIG)
    acc1 = _weigh(weights, scales, inverse, v1, acc1, acc_scale, 1, CONFIG)
    if KIND >= PAGE_INT4:
        acc2 = _weigh(weights, scales, inverse, v2, acc2, acc_scale, 2, CONFIG)
        acc3 = _weigh(weights, scales, inverse, v3, acc3, acc_scale, 3, CONFIG)
    return acc0, acc1, acc2, acc3, new_unit


@triton.jit
def empty_parts(CONFIG: tl.constexpr):
    """Return sums of no values, four parts and their unit. 8-bit formats use two parts."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    WIDTH: tl.constexpr = CONFIG.DV_PAD
    WIDTH2: tl.constexpr = CONFIG.DV_PAD if CONFIG.V_PAGE_KIND >= PAGE_INT4 else 1
    acc0 = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    acc1 = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    acc2 = tl.zeros([BLOCK_M, WIDTH2], tl.float32)
    acc3 = tl.zeros([BLOCK_M, WIDTH2], tl.float32)
    UNIT: tl.constexpr = 1.0 if CONFIG.V_PAGE_KIND >= PAGE_NVFP4 else 0.0
    unit = tl.full([], UNIT, tl.float32)
    return acc0, acc1, acc2, acc3, unit


@triton.jit
def _store_part(out, offsets, acc, factor, valid, PART: tl.constexpr, CONFIG: tl.constexpr):
    """Store one part of the outputs, `acc * factor` row by row."""
    lanes = tl.arange(0, CONFIG.DV_PAD)
    FIRST: tl.constexpr = first_element(PART, CONFIG.DV_WORDS, CONFIG.V_PAGE_KIND)
    elements = FIRST + lanes * element_step(CONFIG.V_PAGE_KIND)
    mask = valid[:, None] & (lanes < CONFIG.DV_WORDS)[None, :]
    x = (acc * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + offsets[:, None] + elements[None, :], x, mask=mask)


@triton.jit
def store_parts(out, offsets, sums, factor, valid, CONFIG: tl.constexpr):
    """Store `sums * factor` row by row."""
    acc0, acc1, acc2, acc3, unit = sums
    factor = factor * unit
    _store_part(out, offsets, acc0, factor, valid, 0, CONFIG)
    _store_part(out, offsets, acc1, factor, valid, 1, CONFIG)
    if CONFIG.V_PAGE_KIND >= PAGE_INT4:
        _store_part(out, offsets, acc2, factor, valid, 2, CONFIG)
        _store_part(out, offsets, acc3, factor, valid, 3, CONFIG)
