"""The cache write of vLLM's PagedAttention (`packed`), and the counters of its Hopper decode."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.quant import encode_fp8, load_scale

__all__ = ["clear_counters_kernel", "packed_write_kernel"]


@triton.jit(
    do_not_specialize="""
        stride_kt stride_kth stride_vt stride_vth stride_kb stride_kh stride_vb stride_vh
    """.split(),
    do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"],
)
def packed_write_kernel(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, num_elements, stride_kt,
    stride_kth, stride_vt, stride_vth, stride_kb, stride_kh, stride_vb, stride_vh,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr,
    K_SCALE_KIND: tl.constexpr, V_SCALE_KIND: tl.constexpr, FP8: tl.constexpr, E5M2: tl.constexpr,
    VEC_K: tl.constexpr, VEC_V: tl.constexpr, VEC_KC: tl.constexpr, VEC_VC: tl.constexpr,
):  # fmt: skip
    """Write keys and values of one token. Grid: (tokens, blocks of BLOCK elements)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    # A negative slot writes nothing (P4).
    if slot >= 0:
        block = slot // BLOCK_SIZE
        within = slot % BLOCK_SIZE
        elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = elements < num_elements
        heads = (elements // D).to(tl.int64)
        lanes = elements % D
        rows = aligned(token * stride_kt + heads * stride_kth, VEC_K)
        k = tl.load(key + rows + lanes, mask=mask, other=0.0)
        rows = aligned(token * stride_vt + heads * stride_vth, VEC_V)
        v = tl.load(value + rows + lanes, mask=mask, other=0.0)
        k_target = key_cache + aligned(block * stride_kb + heads * stride_kh, VEC_KC)
        k_target += lanes // X * (BLOCK_SIZE * X) + within * X + lanes % X
        v_target = value_cache + aligned(block * stride_vb + heads * stride_vh, VEC_VC)
        v_target += lanes * BLOCK_SIZE + within
        if FP8:
            # Round-to-nearest division: the stored bits are then the same on every chip.
            k_divisor = _scales(k_scale, heads, mask, K_SCALE_KIND)
            v_divisor = _scales(v_scale, heads, mask, V_SCALE_KIND)
            k = encode_fp8(tl.math.div_rn(k.to(tl.float32), k_divisor), E5M2)
            v = encode_fp8(tl.math.div_rn(v.to(tl.float32), v_divisor), E5M2)
            tl.store(k_target, k, mask=mask)
            tl.store(v_target, v, mask=mask)
        else:
            tl.store(k_target, k.to(key_cache.dtype.element_ty), mask=mask)
            tl.store(v_target, v.to(value_cache.dtype.element_ty), mask=mask)


@triton.jit
def _scales(scale, heads, mask, KIND: tl.constexpr):
    """Return the scale of each element's head."""
    if KIND == 2:
        values = tl.load(scale + heads, mask=mask, other=1.0)
    else:
        values = tl.zeros(heads.shape, tl.float32) + load_scale(scale, 0, KIND)
    return values


@triton.jit(do_not_specialize=["number"])
def clear_counters_kernel(counters, number, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Set the counters of the Hopper decode to 0. One program."""
    if PDL:
        # The grid before may still use this memory; the decode waits for the zeros by itself.
        gdc_wait()
        gdc_launch_dependents()
    lanes = tl.arange(0, SIZE)
    tl.store(counters + lanes, tl.zeros([SIZE], tl.int32), mask=lanes < number)
