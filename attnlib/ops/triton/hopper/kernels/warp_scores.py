"""Products of keys and queries in the decode of one warp."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from attnlib.ops.triton.hopper.kernels.compat import rounded_product
from attnlib.ops.triton.hopper.kernels.int4 import float32_scale
from attnlib.ops.triton.hopper.kernels.mxfp4 import power_of_group
from attnlib.ops.triton.hopper.kernels.nvfp4 import nvfp4_scales, scaled_nvfp4
from attnlib.ops.triton.hopper.kernels.warp_operands import PRODUCTS, key_parts
from attnlib.ops.triton.kernels.quant import KV_INT4, KV_MXFP4, KV_NVFP4

__all__ = ["tile_scores"]


@gluon.jit
def tile_scores(tiles, stage, tile, queries, k_scales, K_KIND: gl.constexpr):
    """Return the products of a tile of keys with the queries, [keys, rows], times the scales."""
    KEYS: gl.constexpr = tile.shape[0]
    initial = queries.initial
    operands = queries.operands
    ROWS: gl.constexpr = initial[0].shape[0]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 2)
    words = tile.load(OPERAND)
    zeros = gl.zeros([KEYS, ROWS], gl.float32, PRODUCTS)
    if K_KIND == KV_NVFP4:
        # Scores of hidden keys are masked, so that their scales may be NaN.
        slot = tiles.scales.keys_slot(stage)
        of_words = nvfp4_scales(slot, 0, KEYS, False, gl.SliceLayout(1, OPERAND))
        parts = scaled_nvfp4(words, of_words, True)
    else:
        parts = key_parts(words, K_KIND)
    if K_KIND == KV_INT4:
        s0 = mma_v2(parts[0], operands[0], zeros + initial[0][None, :])
        s1 = mma_v2(parts[1], operands[1], zeros + initial[1][None, :])
        s2 = mma_v2(parts[2], operands[2], zeros + initial[2][None, :])
        s3 = mma_v2(parts[3], operands[3], zeros + initial[3][None, :])
        scores = rounded_product(s0, float32_scale(k_scales, 0)[:, None])
        scores = gl.fma(s1, float32_scale(k_scales, 1)[:, None], scores)
        scores = gl.fma(s2, float32_scale(k_scales, 2)[:, None], scores)
        scores = gl.fma(s3, float32_scale(k_scales, 3)[:, None], scores)
    elif K_KIND == KV_MXFP4:
        s0 = mma_v2(parts[0], operands[0], zeros)
        scores = rounded_product(s0, power_of_group(k_scales, 0)[:, None])
        s1 = mma_v2(parts[1], operands[1], zeros)
        scores = gl.fma(s1, power_of_group(k_scales, 1)[:, None], scores)
        s2 = mma_v2(parts[2], operands[2], zeros)
        scores = gl.fma(s2, power_of_group(k_scales, 2)[:, None], scores)
        s3 = mma_v2(parts[3], operands[3], zeros)
        scores = gl.fma(s3, power_of_group(k_scales, 3)[:, None], scores)
    elif K_KIND == KV_NVFP4:
        half = mma_v2(parts[1], operands[1], mma_v2(parts[0], operands[0], zeros))
        scores = mma_v2(parts[3], operands[3], mma_v2(parts[2], operands[2], half))
    else:
        scores = mma_v2(parts[1], operands[1], mma_v2(parts[0], operands[0], zeros))
        if k_scales is not None:
            scores = scores * k_scales[:, None]
    return scores
