"""The product of a tile of latents in quarters with the queries, [latents, rows].

Over 8-bit caches the latents are converted to float16 in registers, which are the first operand of
WGMMA (`latent_bytes`). With GROUP_SCALES, no element is multiplied by its scale: the products of a
quarter are multiplied by the scales of the latents.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from attnlib.ops.triton.hopper.kernels.compat import opaque_zero
from attnlib.ops.triton.hopper.kernels.latent_bytes import HALVES, convert_keys, load_key_halves
from attnlib.ops.triton.hopper.kernels.latent_columns import LATENTS, multiply_keys
from attnlib.ops.triton.hopper.kernels.latent_group_scales import largest_scale, quarter_scale
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_memory import QUARTERS
from attnlib.ops.triton.hopper.kernels.quantized import key_layout
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["score_tile"]


@gluon.jit
def _multiply_quarter(scores, stage, queries, QUARTER: gl.constexpr):
    """Issue the product with a quarter of the elements once it is loaded."""
    stage.wait_full()
    return multiply_keys(scores, stage.tile(), queries.index(QUARTER), QUARTER > 0)


@gluon.jit
def _score_plain_tile(scores, memory, stages, step):
    """`score_tile` of a 16-bit cache. The stage of the elements after the values becomes free."""
    scores = _multiply_quarter(scores, stages[0], memory.queries, 0)
    stage = step % memory.rotary.STAGES
    memory.rotary.wait_full(stage, step)
    queries = memory.query_rotary.index(opaque_zero())
    scores = multiply_keys(scores, memory.rotary.memory.index(stage), queries, True)
    for quarter in gl.static_range(1, QUARTERS):
        scores = _multiply_quarter(scores, stages[quarter], memory.queries, quarter)
    scores = warpgroup_mma_wait(0, deps=[scores])
    memory.rotary.release(stage)
    return scores


@gluon.jit
def _multiply_words(
    scores, words, queries, USE_ACC: gl.constexpr, LAYOUT: gl.constexpr, KV_KIND: gl.constexpr
):
    """Convert 64 elements of each latent and issue their product with the queries, [latents, rows]
    in LAYOUT."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    return multiply_keys(scores, convert_keys(words, KV_KIND, OPERAND), queries, USE_ACC)


@gluon.jit
def _query_half(memory, quarter, HALF: gl.constexpr):
    WIDTH: gl.constexpr = memory.queries.shape[2] // HALVES
    return memory.queries.index(quarter + opaque_zero()).slice(HALF * WIDTH, WIDTH, 1)


@gluon.jit
def _score_bytes(scores, memory, stages, step, KV_KIND: gl.constexpr):
    """`score_tile` of an 8-bit cache with one scale. At most two operands are in registers."""
    LAYOUT: gl.constexpr = scores.type.layout
    stage = step % memory.rotary.STAGES
    memory.rotary.wait_full(stage, step)
    tile = memory.rotary.memory.index(stage)
    words = tile.load(key_layout(tile.shape[0], tile.shape[1]))
    queries = memory.query_rotary.index(opaque_zero())
    scores = _multiply_words(scores, words, queries, False, LAYOUT, KV_KIND)
    for quarter in gl.static_range(QUARTERS):
        stages[quarter].wait_full()
        halves = load_key_halves(stages[quarter].tile())
        for half in gl.static_range(HALVES):
            queries = _query_half(memory, quarter, half)
            scores = _multiply_words(scores, halves[half], queries, True, LAYOUT, KV_KIND)
            scores = warpgroup_mma_wait(1, deps=[scores])
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _multiply_quarter_words(
    scores, USE_ACC: gl.constexpr, memory, stages, QUARTER: gl.constexpr, KV_KIND: gl.constexpr
):
    """Issue the product of a quarter with its queries once it is loaded, in two groups."""
    LAYOUT: gl.constexpr = scores.type.layout
    stages[QUARTER].wait_full()
    halves = load_key_halves(stages[QUARTER].tile())
    queries = _query_half(memory, QUARTER, 0)
    issued = _multiply_words(scores, halves[0], queries, USE_ACC, LAYOUT, KV_KIND)
    queries = _query_half(memory, QUARTER, 1)
    return _multiply_words(issued, halves[1], queries, True, LAYOUT, KV_KIND)


@gluon.jit
def _score_groups(zeros, memory, stages, step, KV_KIND: gl.constexpr):
    """`score_tile` of an 8-bit cache with a scale for each quarter, for up to 16 rows. The products
    with a quarter run while the next one is converted."""
    LAYOUT: gl.constexpr = zeros.type.layout
    stage = step % memory.rotary.STAGES
    memory.rotary.wait_full(stage, step)
    queries = memory.query_rotary.index(opaque_zero())
    pending = multiply_keys(zeros, memory.rotary.memory.index(stage), queries, False)
    issued = _multiply_quarter_words(zeros, False, memory, stages, 0, KV_KIND)
    scores = warpgroup_mma_wait(2, deps=[pending])
    for quarter in gl.static_range(1, QUARTERS):
        pending = issued
        issued = _multiply_quarter_words(zeros, False, memory, stages, quarter, KV_KIND)
        pending = warpgroup_mma_wait(2, deps=[pending])
        scores += pending * quarter_scale(memory, step, quarter - 1, LAYOUT)[:, None]
    issued = warpgroup_mma_wait(0, deps=[issued])
    return scores + issued * quarter_scale(memory, step, QUARTERS - 1, LAYOUT)[:, None]


_LEAST_SHARE: gl.constexpr = gl.constexpr(2.0**-40)
_LEAST_UNIT: gl.constexpr = gl.constexpr(2.0**-60)
"""Scales of keys in `_score_groups_in_place` are at least this share of the largest one of their
latent, and at least this number. So quotients of two of them are in the range of float32, and the
error is at most 2 ** -40 of the largest element."""


@gluon.jit
def _unit(memory, step, QUARTER: gl.constexpr, least, LAYOUT: gl.constexpr):
    """Return the scales of a quarter, at least `least`; NaN stays."""
    scales = quarter_scale(memory, step, QUARTER, LAYOUT)
    return gl.maximum(scales, least) + scales * 0.0


@gluon.jit
def _score_groups_in_place(zeros, memory, stages, step, KV_KIND: gl.constexpr):
    """`score_tile` of an 8-bit cache with a scale for each quarter, for more rows.

    There are no registers for a second accumulator: before the products with a quarter, the scores
    are divided by its scale, in units of which they are then.
    """
    LAYOUT: gl.constexpr = zeros.type.layout
    stage = step % memory.rotary.STAGES
    memory.rotary.wait_full(stage, step)
    queries = memory.query_rotary.index(opaque_zero())
    scores = multiply_keys(zeros, memory.rotary.memory.index(stage), queries, False)
    scores = warpgroup_mma_wait(0, deps=[scores])
    least = gl.maximum(largest_scale(memory, step, LAYOUT) * _LEAST_SHARE, _LEAST_UNIT)
    unit = _unit(memory, step, 0, least, LAYOUT)
    scores = scores * (1.0 / unit)[:, None]
    for quarter in gl.static_range(QUARTERS):
        if quarter > 0:
            before = unit
            unit = _unit(memory, step, quarter, least, LAYOUT)
            scores = scores * (before / unit)[:, None]
        scores = _multiply_quarter_words(scores, True, memory, stages, quarter, KV_KIND)
        scores = warpgroup_mma_wait(0, deps=[scores])
    return scores * unit[:, None]


@gluon.jit
def score_tile(memory, stages, step, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Return the products of a tile and the queries, [latents, rows].

    Over a 16-bit cache the stage of the elements after the values becomes free.

    Args:
        stages: of the quarters of the tile.
        step: number of the tile.
    """
    ROWS: gl.constexpr = CONFIG.ROWS
    zeros = gl.zeros([LATENTS, ROWS], gl.float32, LAYOUT)
    if CONFIG.KV_KIND == KV_PLAIN:
        return _score_plain_tile(zeros, memory, stages, step)
    elif CONFIG.GROUP_SCALES and CONFIG.ROWS <= 16:
        return _score_groups(zeros, memory, stages, step, CONFIG.KV_KIND)
    elif CONFIG.GROUP_SCALES:
        return _score_groups_in_place(zeros, memory, stages, step, CONFIG.KV_KIND)
    else:
        return _score_bytes(zeros, memory, stages, step, CONFIG.KV_KIND)
