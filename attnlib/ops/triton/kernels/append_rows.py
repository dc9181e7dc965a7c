"""Write one new token of each row behind the cached ones."""

from __future__ import annotations

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.cache_write import Heads, load_heads, store_heads
from attnlib.ops.triton.kernels.chunks import aligned

__all__ = ["append_rows_kernel"]


@triton.jit(
    do_not_specialize="""
        position num_heads stride_kr stride_kh stride_vr stride_vh stride_ksr stride_kst stride_ksh
        stride_vsr stride_vst stride_vsh
    """.split(),
)
def append_rows_kernel(
    key,
    value,
    keys,
    values,
    position,
    num_heads,
    stride_kr,
    stride_kh,
    stride_vr,
    stride_vh,
    stride_ksr,
    stride_kst,
    stride_ksh,
    stride_vsr,
    stride_vst,
    stride_vsh,
    CONFIG: tl.constexpr,
):
    """Write key and value to row `position`. CONFIG is a `WriteConfig`. Grid: (rows of the batch,
    blocks of heads)."""
    row = tl.program_id(0).to(tl.int64)
    token = position.to(tl.int64)
    heads = tl.program_id(1) * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
    exist = heads < num_heads
    source = Heads(key + aligned(row * stride_kr, CONFIG.VEC_K), heads, exist, stride_kh)
    new_key = load_heads(source, 0, CONFIG.D, CONFIG.D_PAD, CONFIG.VEC_K)
    source = Heads(value + aligned(row * stride_vr, CONFIG.VEC_V), heads, exist, stride_vh)
    new_value = load_heads(source, 0, CONFIG.DV, CONFIG.DV_PAD, CONFIG.VEC_V)
    base = keys + aligned(row * stride_ksr, CONFIG.VEC_KC)
    base += aligned(token * stride_kst, CONFIG.VEC_KC)
    store_heads(
        new_key,
        Heads(base, heads, exist, stride_ksh),
        1.0,
        0,
        CONFIG.D,
        CONFIG.D_PAD,
        0,
        False,
        False,
        CONFIG.VEC_KC,
    )
    base = values + aligned(row * stride_vsr, CONFIG.VEC_VC)
    base += aligned(token * stride_vst, CONFIG.VEC_VC)
    store_heads(
        new_value,
        Heads(base, heads, exist, stride_vsh),
        1.0,
        0,
        CONFIG.DV,
        CONFIG.DV_PAD,
        0,
        False,
        False,
        CONFIG.VEC_VC,
    )
