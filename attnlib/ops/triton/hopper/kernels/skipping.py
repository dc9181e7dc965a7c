"""Key tiles of the Hopper prefill, without those whose weights are below a threshold (M18).

A warpgroup leaves a tile out if the largest weight of every one of its rows, relative to the
largest weight that the row has seen, is below the threshold: it then computes neither weights nor
the product with the values (BLASST, Yuan et al. 2025). The tile's values are loaded all the same.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from attnlib.ops.triton.hopper.kernels.mainloop import (
    multiply_keys,
    multiply_values,
    pack_weights,
    unpack_weights,
)
from attnlib.ops.triton.hopper.kernels.softmax import (
    online_softmax,
    transform_scores,
)

__all__ = ["attend_kept_tiles", "multiply_last_values"]


@gluon.jit
def _weigh_or_skip(
    scores, weights, valid, row_max, row_sum, factor, soft_cap, HAS_CAP: gl.constexpr,
    SKIP_BELOW: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Turn raw products into packed weights, unless the tile is left out.

    Returns:
        (weights, those given if the tile is left out; factor [M] of what was accumulated before;
        row_max; row_sum; whether the tile has weights: 1 or 0).
    """
    scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
    if HAS_CAP:
        weight_factor = 1.0
    else:
        weight_factor = factor
    # Comparisons with NaN are false: a tile with NaN is kept.
    is_small = gl.max(scores, 1) * weight_factor < row_max + SKIP_BELOW
    kept = gl.max(gl.where(valid & (is_small == 0), 1, 0), 0)
    acc_scale = gl.full(row_max.shape, 1.0, gl.float32, row_max.type.layout)
    if kept != 0:
        probs, acc_scale, row_max, row_sum = online_softmax(
            scores, factor, row_max, row_sum, False, HAS_CAP
        )
        weights = pack_weights(probs, DTYPE)
    return weights, acc_scale, row_max, row_sum, kept


@gluon.jit
def _step(
    q_operand, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, row_max, row_sum,
    kept, step, valid, factor, soft_cap, STAGES: gl.constexpr, HAS_CAP: gl.constexpr,
    P_LAYOUT: gl.constexpr, ELEMENTS: gl.constexpr, SKIP_BELOW: gl.constexpr,
):  # fmt: skip
    """`mainloop.overlapped_step` for an unmasked tile that may be left out.

    `kept` says whether the tile before this one has weights, which the product with its values
    needs. Waits are inside of the branches, so that no product is in flight where they join.
    """
    DTYPE: gl.constexpr = k_ring.dtype
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    S_LAYOUT: gl.constexpr = row_max.type.layout.parent
    stage = step % STAGES
    v_stage = (step - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    zeros = gl.zeros([acc.shape[0], BLOCK_N], gl.float32, S_LAYOUT)
    if kept != 0:
        scores = multiply_keys(q_operand, k_ring.index(stage), zeros, ELEMENTS)
        mbarrier.wait(v_full.index(v_stage), ((step - 1) // STAGES) & 1)
        acc = multiply_values(
            unpack_weights(weights, DTYPE, P_LAYOUT), v_ring.index(v_stage), acc, -1
        )
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, acc_scale, row_max, row_sum, kept = _weigh_or_skip(
            scores, weights, valid, row_max, row_sum, factor, soft_cap, HAS_CAP, SKIP_BELOW,
            DTYPE)  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[acc])
        acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, acc.type.layout))[:, None]
    else:
        scores = multiply_keys(q_operand, k_ring.index(stage), zeros, ELEMENTS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, acc_scale, row_max, row_sum, kept = _weigh_or_skip(
            scores, weights, valid, row_max, row_sum, factor, soft_cap, HAS_CAP, SKIP_BELOW,
            DTYPE)  # fmt: skip
        # The loader may not refill a stage before its last load has arrived.
        mbarrier.wait(v_full.index(v_stage), ((step - 1) // STAGES) & 1)
        if kept != 0:
            acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, acc.type.layout))[:, None]
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    return acc, weights, row_max, row_sum, kept


@gluon.jit
def attend_kept_tiles(
    q_operand, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, row_max, row_sum,
    step, begin, end, valid, factor, soft_cap, STAGES: gl.constexpr, HAS_CAP: gl.constexpr,
    P_LAYOUT: gl.constexpr, ELEMENTS: gl.constexpr, SKIP_BELOW: gl.constexpr,
):  # fmt: skip
    """Visit the unmasked tiles in [begin, end), from right to left.

    The tile before them has been weighed and has `weights`.

    Returns:
        (acc, packed weights of the tile at `begin`, row_max, row_sum, whether it has weights, the
        next step).
    """
    kept = 1
    for _ in range(0, end - begin):
        acc, weights, row_max, row_sum, kept = _step(
            q_operand, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, row_max,
            row_sum, kept, step, valid, factor, soft_cap, STAGES, HAS_CAP, P_LAYOUT, ELEMENTS,
            SKIP_BELOW)  # fmt: skip
        step += 1
    return acc, weights, row_max, row_sum, kept, step


@gluon.jit
def multiply_last_values(
    v_ring, v_full, v_empty, acc, weights, kept, step, STAGES: gl.constexpr, P_LAYOUT: gl.constexpr
):  # fmt: skip
    """Multiply by the values of the tile visited last, unless it was left out."""
    stage = (step - 1) % STAGES
    mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
    if kept != 0:
        operand = unpack_weights(weights, v_ring.dtype, P_LAYOUT)
        acc = multiply_values(operand, v_ring.index(stage), acc, -1)
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc
