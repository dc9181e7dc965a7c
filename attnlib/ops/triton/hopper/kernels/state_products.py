"""The state after a chunk that a decode fills, by products of matrices, for decays per head.

With S the state before the chunk, b the sums of the decays up to each token, and n the inverse
lengths of keys, the rows u of a chunk follow from those before them:

    u_i = beta_i (v_i - n_i exp(b_i) S k_i) - sum_j beta_i n_i n_j exp(b_i - b_j) (k_i k_j) u_j
    S' = exp(b) S + sum_i n_i exp(b - b_i) u_i k_i^T

with the last b. Additive updates have u = beta v. Matrix units multiply bfloat16: three such
numbers are one of float32, and keys are one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from attnlib.ops.triton.hopper.kernels.compat import reinterpret
from attnlib.ops.triton.hopper.kernels.state_memory import PART_KEYS, ROWS_LAYOUT, VECTOR
from attnlib.ops.triton.hopper.kernels.state_slots import store_state
from attnlib.ops.triton.kernels.state_chunk import cut
from attnlib.ops.triton.kernels.state_sums import summable

__all__ = ["add", "fill_by_products"]


class Factors(NamedTuple):
    """Factors of the rows of a chunk, [UNIT], in the order of `Shared`.

    Attributes:
        beta, norm: beta, and the inverse length of the key.
        total, after: sums of the decays up to a token, and behind it.
        time: places in the order of the tokens.
    """

    beta: Any
    norm: Any
    total: Any
    after: Any
    time: Any


@gluon.constexpr_function
def _product_layout(CONFIG):
    return gl.NVMMADistributedLayout([2, 0], [CONFIG.WARPS, 1], [16, 8])


@gluon.constexpr_function
def _number_layout(CONFIG):
    """[UNIT], all of them in each thread."""
    return gl.BlockedLayout([CONFIG.UNIT], [32], [CONFIG.WARPS], [0])


@gluon.jit
def add(a, b):
    """Return the sum of two numbers, for scans."""
    return a + b


@gluon.jit
def _factors(shared, new, CONFIG: gl.constexpr):
    """Return the `Factors` of a chunk, each thread with all of them."""
    UNIT: gl.constexpr = CONFIG.UNIT
    NUMBERS: gl.constexpr = _number_layout(CONFIG)
    row = gl.arange(0, UNIT, NUMBERS)
    is_new = row == UNIT - 1
    beta = gl.full([UNIT], 1.0, gl.float32, NUMBERS)
    if CONFIG.HAS_BETA:
        held = reinterpret(shared.betas, gl.float32, [UNIT], VECTOR).load(NUMBERS)
        beta = gl.where(is_new, new.beta, held)
    held = reinterpret(shared.decays, gl.float32, [UNIT], VECTOR).load(NUMBERS)
    held = gl.where(is_new, 0.0, summable(held))
    newest = summable(new.decay)
    sums = gl.associative_scan(held, 0, add)
    whole = gl.sum(held, 0) + newest
    after = gl.where(is_new, 0.0, sums - held + newest)
    norm = gl.full([UNIT], 1.0, gl.float32, NUMBERS)
    if CONFIG.NORM:
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [CONFIG.WARPS, 1], [1, 0])
        SHAPE: gl.constexpr = [UNIT, CONFIG.DK]
        keys = reinterpret(shared.key_rows, shared.key_rows.dtype, SHAPE, ROWS_LAYOUT)
        k = keys.load(ROWS).to(gl.float32)
        norm = gl.convert_layout(gl.rsqrt(gl.sum(k * k, 1) + CONFIG.EPS), NUMBERS)
    time = (2 * UNIT - 2 - row) % UNIT
    return Factors(beta, norm, whole - after, after, time), whole


@gluon.jit
def _laid_out(factors, LAYOUT: gl.constexpr):
    """Return `Factors` in a layout."""
    return Factors(*[gl.convert_layout(x, LAYOUT) for x in factors])


@gluon.jit
def _multiply(x, rows, acc, CONFIG: gl.constexpr):
    """Return acc + x rows; x is float32."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, _product_layout(CONFIG), 2)
    high, rest = cut(gl.convert_layout(x, OPERAND))
    middle, rest = cut(rest)
    low, _ = cut(rest)
    return mma_v2(high, rows, mma_v2(middle, rows, mma_v2(low, rows, acc)))


@gluon.jit
def _keys(shared, first: gl.constexpr, COLUMNS: gl.constexpr, CONFIG: gl.constexpr):
    """Return the shared memory of some columns of the keys, [UNIT, COLUMNS]."""
    SHAPE: gl.constexpr = [CONFIG.UNIT, CONFIG.DK]
    rows = reinterpret(shared.key_rows, shared.key_rows.dtype, SHAPE, ROWS_LAYOUT)
    return rows.slice(first, COLUMNS, 1)


@gluon.jit
def _store_pairs(pairs, shared, factors, CONFIG: gl.constexpr):
    """Store what a row u_j adds to later ones, [UNIT, UNIT], with j first."""
    UNIT: gl.constexpr = CONFIG.UNIT
    PARTS: gl.constexpr = CONFIG.DK // PART_KEYS
    LAYOUT: gl.constexpr = _product_layout(CONFIG)
    acc = gl.zeros([UNIT, UNIT], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        rows = _keys(shared, part * PART_KEYS, PART_KEYS, CONFIG)
        a = rows.load(gl.DotOperandLayout(0, LAYOUT, 2))
        acc = mma_v2(a, rows.permute((1, 0)).load(gl.DotOperandLayout(1, LAYOUT, 2)), acc)
    j = _laid_out(factors, gl.SliceLayout(1, LAYOUT))
    i = _laid_out(factors, gl.SliceLayout(0, LAYOUT))
    later = j.time[:, None] < i.time[None, :]
    decay = gl.exp(gl.where(later, j.after[:, None] - i.after[None, :], 0.0))
    acc = acc * decay * j.norm[:, None] * (i.norm * i.beta)[None, :]
    pairs.store(gl.where(later, acc, 0.0))


@gluon.jit
def _solve(shared, factors, u, pairs, CONFIG: gl.constexpr):
    """Return the rows u [ROWS * PASSES, UNIT] of updates by differences, from beta v."""
    UNIT: gl.constexpr = CONFIG.UNIT
    PARTS: gl.constexpr = CONFIG.DK // PART_KEYS
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    LAYOUT: gl.constexpr = _product_layout(CONFIG)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    seen = gl.zeros([SPAN, UNIT], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        x = shared.state.slice(part * PART_KEYS, PART_KEYS, 1)
        keys = _keys(shared, part * PART_KEYS, PART_KEYS, CONFIG).permute((1, 0))
        operand = keys.load(gl.DotOperandLayout(1, LAYOUT, 2))
        seen = _multiply(x.load(gl.DotOperandLayout(0, LAYOUT, 2)), operand, seen, CONFIG)
    given = _laid_out(factors, COLUMN)
    u = gl.fma(seen, -(given.beta * given.norm * gl.exp(given.total))[None, :], u)
    number = gl.arange(0, UNIT, COLUMN)
    for step in gl.static_range(UNIT - 1):
        column = gl.sum(gl.where((number == UNIT - 2 - step)[None, :], u, 0.0), 1)
        later = reinterpret(pairs, gl.float32, [UNIT, UNIT], VECTOR).index(UNIT - 2 - step)
        u = gl.fma(column[:, None], -later.load(COLUMN)[None, :], u)
    return u


@gluon.jit
def fill_by_products(shared, new, state, slot, head, block, CONFIG: gl.constexpr):
    """Store the state after the chunk, whose last token is in `shared`, too."""
    UNIT: gl.constexpr = CONFIG.UNIT
    PARTS: gl.constexpr = CONFIG.DK // PART_KEYS
    SPAN: gl.constexpr = CONFIG.ROWS * CONFIG.PASSES
    LAYOUT: gl.constexpr = _product_layout(CONFIG)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    factors, whole = _factors(shared, new, CONFIG)
    values = reinterpret(shared.value_rows, shared.value_rows.dtype, [UNIT, SPAN], ROWS_LAYOUT)
    given = _laid_out(factors, COLUMN)
    u = values.permute((1, 0)).load(LAYOUT).to(gl.float32) * given.beta[None, :]
    if CONFIG.DELTA:
        pairs = gl.allocate_shared_memory(gl.float32, [UNIT, UNIT], ROWS_LAYOUT)
        _store_pairs(pairs, shared, factors, CONFIG)
        u = _solve(shared, factors, u, pairs, CONFIG)
    kept = u * (given.norm * gl.exp(given.after))[None, :]
    for part in gl.static_range(PARTS):
        operand = _keys(shared, part * PART_KEYS, PART_KEYS, CONFIG).load(
            gl.DotOperandLayout(1, LAYOUT, 2)
        )
        x = shared.state.slice(part * PART_KEYS, PART_KEYS, 1).load(LAYOUT) * gl.exp(whole)
        x = _multiply(kept, operand, x, CONFIG)
        store_state((x,), state + part * PART_KEYS, slot, head, block, 0, LAYOUT, CONFIG)
