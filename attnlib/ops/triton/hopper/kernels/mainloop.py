"""The inner step of the prefill: two products in flight, a softmax between them.

The product of a tile's keys is issued before that of the previous tile's values is awaited (FlashAttention-3, Shah et
al. 2024), so the tensor cores work while the softmax does. Weights cross from one step to the next.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.softmax import hide_keys, transform_scores, weigh

__all__ = ["overlapped_step", "pack_weights", "unpack_weights"]


@gluon.jit
def pack_weights(weights, DTYPE: gl.constexpr):
    """Weights [M, N] in float32 as pairs of DTYPE in 32-bit words [M, N // 2]: carried over a loop's edge one by one,
    16-bit values would take a register each and be packed again for every product."""
    M: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    low, high = gl.split(gl.reshape(weights, [M, N // 2, 2]))
    if DTYPE == gl.bfloat16:
        words = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
        )
    else:
        words = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
        )
    return words


@gluon.jit
def unpack_weights(words, DTYPE: gl.constexpr, P_LAYOUT: gl.constexpr):
    """The operand of the product with the values."""
    M: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1] * 2
    low = words.to(gl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [M, N]), P_LAYOUT)


@gluon.jit
def overlapped_step(q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, peak, total, step, tile, row_first,
          row_last, factor, soft_cap, STAGES: gl.constexpr,
          MASKED: gl.constexpr, CHECK_FIRST: gl.constexpr, HAS_CAP: gl.constexpr,
          P_LAYOUT: gl.constexpr):  # fmt: skip
    """Products with the keys of `tile` and with the values of the tile before it, then the softmax between them."""
    ROWS: gl.constexpr = q_tile.shape[0]
    DTYPE: gl.constexpr = q_tile.dtype
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    S_LAYOUT: gl.constexpr = row_last.type.layout.parent
    stage = step % STAGES
    parity = (step // STAGES) & 1
    v_stage = (step - 1) % STAGES
    v_parity = ((step - 1) // STAGES) & 1
    mbarrier.wait(k_full.index(stage), parity)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        q_tile, k_ring.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(v_stage), v_parity)
    acc = warpgroup_mma(
        unpack_weights(weights, DTYPE, P_LAYOUT), v_ring.index(v_stage), acc, is_async=True
    )
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
    if MASKED:
        scores = hide_keys(scores, row_first, row_last, tile * BLOCK_N, CHECK_FIRST)
    grown, decay, peak, total = weigh(scores, factor, peak, total, MASKED, HAS_CAP)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, pack_weights(grown, DTYPE), peak, total
