"""Store new keys and values in the paged cache. One program per token and block of heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.quant import encode_fp8, load_scale, valid_scale

__all__ = ["Heads", "WriteConfig", "load_heads", "slot_heads", "store_heads", "write_kv_kernel"]


class WriteConfig(NamedTuple):
    """Constants of the kernels that write keys and values.

    Attributes:
        BLOCK_SIZE: tokens per block of the cache.
        D, DV, D_PAD, DV_PAD: head sizes, and the powers of two that hold them.
        BLOCK_H: heads of a program.
        VEC_K, VEC_V, VEC_KC, VEC_VC: elements of which the offsets of keys, values and their caches
            are multiples. Strides of a growing cache change from step to step, so that none may
            select a compilation by its value.
        K_SCALE_KIND, V_SCALE_KIND, FP8, E5M2: float8 elements of the cache (`quant`).
        LATENT: values are a prefix of the keys (P10).
        ONE_TOKEN: a request has one new token.
        PDL: the kernel starts before the previous one has ended.
    """

    BLOCK_SIZE: int
    D: int
    DV: int
    D_PAD: int
    DV_PAD: int
    BLOCK_H: int
    VEC_K: int = 1
    VEC_V: int = 1
    VEC_KC: int = 1
    VEC_VC: int = 1
    K_SCALE_KIND: int = 0
    V_SCALE_KIND: int = 0
    FP8: bool = False
    E5M2: bool = False
    LATENT: bool = False
    ONE_TOKEN: bool = False
    PDL: bool = False


class Heads(NamedTuple):
    """Heads of one token: pointer to the token, numbers of the heads, which of them exist, and
    their stride."""

    base: Any
    numbers: Any
    exist: Any
    stride: Any


@triton.jit
def slot_heads(
    cache, slot, heads, exist, stride_cb, stride_cn, stride_ch, BLOCK_SIZE: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Return the heads of a KV slot."""
    offset = (slot // BLOCK_SIZE) * stride_cb + (slot % BLOCK_SIZE) * stride_cn
    return Heads(cache + aligned(offset, VEC), heads, exist, stride_ch)


@triton.jit
def load_heads(
    source, FIRST: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, VEC: tl.constexpr
):
    """Load SIZE elements of each head, from element FIRST on."""
    lanes = tl.arange(0, PADDED)
    mask = source.exist[:, None] & (lanes < SIZE)[None, :]
    offsets = aligned(source.numbers.to(tl.int64) * source.stride, VEC)
    return tl.load(source.base + FIRST + offsets[:, None] + lanes[None, :], mask=mask, other=0.0)


@triton.jit
def store_heads(
    x, target, scale, FIRST: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    SCALE_KIND: tl.constexpr, FP8: tl.constexpr, E5M2: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Store SIZE elements of each head, from element FIRST on; divide by the scale and convert for
    float8."""
    lanes = tl.arange(0, PADDED)
    mask = target.exist[:, None] & (lanes < SIZE)[None, :]
    offsets = aligned(target.numbers.to(tl.int64) * target.stride, VEC)
    pointers = target.base + FIRST + offsets[:, None] + lanes[None, :]
    if FP8:
        x = x.to(tl.float32)
        if SCALE_KIND == 2:
            divisor = tl.load(scale + target.numbers, mask=target.exist, other=1.0)
            divisor = valid_scale(divisor)[:, None]
        else:
            divisor = tl.zeros([1, 1], tl.float32) + load_scale(scale, 0, SCALE_KIND)
        divisor, x = tl.broadcast(divisor, x)
        # Round-to-nearest division: the stored bits are then the same on every chip.
        tl.store(pointers, encode_fp8(tl.math.div_rn(x, divisor), E5M2), mask=mask)
    else:
        tl.store(pointers, x.to(target.base.dtype.element_ty), mask=mask)


# Slices with arbitrary offsets, read one element at a time: their alignment must not select a
# compilation.
@triton.jit(
    do_not_specialize="""
        stride_kt stride_kh stride_vt stride_vh stride_kcb stride_kcn stride_kch stride_vcb
        stride_vcn stride_vch
    """.split(),
    do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"],
)
def write_kv_kernel(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, num_heads, stride_kt,
    stride_kh, stride_vt, stride_vh, stride_kcb, stride_kcn, stride_kch, stride_vcb, stride_vcn,
    stride_vch, CONFIG: tl.constexpr,
):  # fmt: skip
    """Write keys and values of one token; with LATENT, values are a prefix of the keys (P10).

    CONFIG is a `WriteConfig`. Grid: (tokens, blocks of heads).
    """
    if CONFIG.PDL:
        # This grid may start while the previous one drains, and the attention kernel, which waits
        # for the cache, may start now. Nothing is read before the wait.
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    # A negative slot writes nothing (P4).
    if slot >= 0:
        token64 = token.to(tl.int64)
        heads = tl.program_id(1) * CONFIG.BLOCK_H + tl.arange(0, CONFIG.BLOCK_H)
        exist = heads < num_heads
        new = Heads(key + aligned(token64 * stride_kt, CONFIG.VEC_K), heads, exist, stride_kh)
        x = load_heads(new, 0, CONFIG.D, CONFIG.D_PAD, CONFIG.VEC_K)
        target = slot_heads(
            key_cache, slot, heads, exist, stride_kcb, stride_kcn, stride_kch, CONFIG.BLOCK_SIZE,
            CONFIG.VEC_KC)  # fmt: skip
        store_heads(
            x, target, k_scale, 0, CONFIG.D, CONFIG.D_PAD, CONFIG.K_SCALE_KIND, CONFIG.FP8,
            CONFIG.E5M2, CONFIG.VEC_KC)  # fmt: skip
        if not CONFIG.LATENT:
            new = Heads(value + aligned(token64 * stride_vt, CONFIG.VEC_V), heads, exist, stride_vh)
            x = load_heads(new, 0, CONFIG.DV, CONFIG.DV_PAD, CONFIG.VEC_V)
            target = slot_heads(
                value_cache, slot, heads, exist, stride_vcb, stride_vcn, stride_vch,
                CONFIG.BLOCK_SIZE, CONFIG.VEC_VC)  # fmt: skip
            store_heads(
                x, target, v_scale, 0, CONFIG.DV, CONFIG.DV_PAD, CONFIG.V_SCALE_KIND, CONFIG.FP8,
                CONFIG.E5M2, CONFIG.VEC_VC)  # fmt: skip
