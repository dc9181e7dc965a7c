"""The scales of quarters of packed latents in shared memory (P14)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.latent_columns import LATENTS
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_memory import QUARTERS

__all__ = ["largest_scale", "quarter_scale"]


@gluon.constexpr_function
def _scale_layout():
    """Return the layout of [LATENTS, 1] in which a thread has the scales of its latents."""
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [LATENTS.value, 1])


@gluon.jit
def quarter_scale(memory, step, QUARTER: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the scales of a quarter of tile number `step`, [LATENTS], along the rows of LAYOUT.

    Infinite ones become NaN: a score of -inf would hide the latent. They are loaded where they
    are needed: few registers are left.
    """
    stage = step % memory.rotary.STAGES
    scales = memory.rotary.scales.index(stage).slice(QUARTER, 1, 1).load(_scale_layout())
    scales = gl.convert_layout(gl.reshape(scales, [LATENTS]), gl.SliceLayout(1, LAYOUT))
    return scales + scales * 0.0


@gluon.jit
def largest_scale(memory, step, LAYOUT: gl.constexpr):
    """Return the largest scale of each latent of tile number `step`, [LATENTS], along the rows of
    LAYOUT."""
    largest = quarter_scale(memory, step, 0, LAYOUT)
    for quarter in gl.static_range(1, QUARTERS):
        largest = gl.maximum(largest, quarter_scale(memory, step, quarter, LAYOUT))
    return largest
