"""RMSNorm of query and key heads, in registers; `ops.rotary` defines the arithmetic (P11)."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["NORM_FLOAT32", "NORM_NONE", "NORM_ROUNDED", "inverse_rms", "normalize", "weighted"]

NORM_NONE: tl.constexpr = tl.constexpr(0)
NORM_ROUNDED: tl.constexpr = tl.constexpr(1)  # rounded before the weight (Llama, Qwen3)
NORM_FLOAT32: tl.constexpr = tl.constexpr(2)  # the weight is applied in float32 (Gemma)


@triton.jit
def inverse_rms(x, eps, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_H: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of each head, `[BLOCK_H, 1]` float32."""
    x = x.to(tl.float32)
    sums = x * x
    LEVELS: tl.constexpr = D_PAD.bit_length() - 1
    # Pairs of neighbors: an order that does not depend on how the elements are distributed over
    # threads, and that needs no communication for the elements of one thread.
    for level in tl.static_range(LEVELS):
        sums = tl.sum(tl.reshape(sums, [BLOCK_H, D_PAD >> (level + 1), 2]), axis=2)
    sums = tl.reshape(sums, [BLOCK_H, 1])
    root = tl.sqrt_rn(sums * (1.0 / D) + eps)
    return tl.math.div_rn(tl.full([BLOCK_H, 1], 1.0, tl.float32), root)


@triton.jit
def normalize(
    x, factor, weight, SIZE: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Multiply the heads by the inverse RMS and by their weight; rounded to the dtype of `x`."""
    if NORM == NORM_NONE:
        y = x
    else:
        lanes = tl.arange(0, PADDED)
        w = tl.load(weight + lanes, mask=lanes < SIZE, other=0.0)
        y = weighted(x, factor, w, NORM, WEIGHT_OFFSET)
    return y


@triton.jit
def weighted(x, factor, weight, NORM: tl.constexpr, WEIGHT_OFFSET: tl.constexpr):
    """Multiply the heads by the inverse RMS and by the weights of their elements."""
    w = weight.to(tl.float32)[None, :]
    y = x.to(tl.float32) * factor
    if NORM == NORM_FLOAT32:
        if WEIGHT_OFFSET != 0:
            w = w + WEIGHT_OFFSET
        y = (y * w).to(x.dtype)
    else:
        y = (y.to(x.dtype).to(tl.float32) * w).to(x.dtype)
    return y
