"""Store new keys and values in pages that hold their scales (M16): one launch quantizes and writes,
and rotates heads for the cache where it stores rotated ones (P15).

One program per token and block of heads.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.cache_write import Heads, load_heads
from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.hadamard import turned
from attnlib.ops.triton.kernels.page_store import (
    load_parts,
    split_heads,
    store_parts,
)

__all__ = ["PageWriteConfig", "page_slot", "store_rows", "write_pages_kernel"]


class PageWriteConfig(NamedTuple):
    """Constants of the kernel.

    Attributes:
        BLOCK_SIZE: tokens per block of the cache.
        BLOCK_H: heads of a program.
    """

    BLOCK_SIZE: int
    BLOCK_H: int


@triton.jit
def page_slot(base, slot, stride_b, stride_n, BLOCK_SIZE: tl.constexpr, VEC: tl.constexpr):
    """Return the pointer to a KV slot."""
    return base + aligned((slot // BLOCK_SIZE) * stride_b + (slot % BLOCK_SIZE) * stride_n, VEC)


@triton.jit
def store_rows(source, target, scales, signs, SIDE: tl.constexpr):
    """Quantize the heads of one token in a KV slot. SIDE is a `PageSide`."""
    if SIDE.TURN > 0:
        x = load_heads(source, 0, SIDE.SIZE, SIDE.PADDED, SIDE.VEC)
        x0, x1, x2, x3 = split_heads(turned(x, signs, SIDE), SIDE)
    else:
        x0, x1, x2, x3 = load_parts(source, SIDE)
    store_parts(x0, x1, x2, x3, target, scales, SIDE)


@triton.jit(
    do_not_specialize="""
        stride_kt stride_kh stride_vt stride_vh stride_kcb stride_kcn stride_kch stride_vcb
        stride_vcn stride_vch stride_ksb stride_ksn stride_ksh stride_vsb stride_vsn stride_vsh
    """.split(),
    do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"],
)
def write_pages_kernel(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, num_heads, stride_kt,
    stride_kh, stride_vt, stride_vh, stride_kcb, stride_kcn, stride_kch, stride_vcb, stride_vcn,
    stride_vch, stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn, stride_vsh, signs,
    CONFIG: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Quantize and write keys and values of one token.

    CONFIG is a `PageWriteConfig`, KEYS and VALUES are `PageSide`s. `signs` are those of keys, then
    those of values, for sides that rotate. Grid: (tokens, blocks of heads).
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    # A negative slot writes nothing (P4).
    if slot >= 0:
        heads = tl.program_id(1) * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
        exist = heads < num_heads
        SIZE: tl.constexpr = CONFIG.BLOCK_SIZE
        rows = key + aligned(token * stride_kt, KEYS.VEC)
        target = page_slot(key_cache, slot, stride_kcb, stride_kcn, SIZE, KEYS.VEC_C)
        scale = page_slot(k_scale, slot, stride_ksb, stride_ksn, SIZE, 1)
        store_rows(
            Heads(rows, heads, exist, stride_kh), Heads(target, heads, exist, stride_kch),
            Heads(scale, heads, exist, stride_ksh), signs, KEYS)  # fmt: skip
        rows = value + aligned(token * stride_vt, VALUES.VEC)
        target = page_slot(value_cache, slot, stride_vcb, stride_vcn, SIZE, VALUES.VEC_C)
        scale = page_slot(v_scale, slot, stride_vsb, stride_vsn, SIZE, 1)
        if VALUES.TURN > 0:
            signs += KEYS.SIZE
        store_rows(
            Heads(rows, heads, exist, stride_vh), Heads(target, heads, exist, stride_vch),
            Heads(scale, heads, exist, stride_vsh), signs, VALUES)  # fmt: skip
