"""Merge two partial attention results over disjoint keys.

Work distribution: one program per token and block of heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnlib.ops.triton.kernels.chunks import aligned
from attnlib.ops.triton.kernels.softmax import LN2, LOG2E

__all__ = ["merge_partial_rows_kernel", "merge_states_kernel"]


@triton.jit(
    do_not_specialize="""
        stride_at stride_ah stride_bt stride_bh stride_ot stride_oh stride_la stride_lb
        stride_lo
    """.split(),
)
def merge_states_kernel(
    out_a, lse_a, out_b, lse_b, out, lse, num_heads, stride_at, stride_ah, stride_bt, stride_bh,
    stride_ot, stride_oh, stride_la, stride_lb, stride_lo, HAS_LSE: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr, VEC_A: tl.constexpr, VEC_B: tl.constexpr,
    VEC_O: tl.constexpr,
):  # fmt: skip
    """Weight each side by exp(lse - merged lse) and add. Grid: (tokens, blocks of heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    live = head < num_heads
    minus_inf = float("-inf")
    a = tl.load(lse_a + token * stride_la + head, mask=live, other=minus_inf)
    b = tl.load(lse_b + token * stride_lb + head, mask=live, other=minus_inf)
    # Some kernels report +inf for rows without a key; it counts as -inf.
    a = tl.where(a == float("inf"), minus_inf, a)
    b = tl.where(b == float("inf"), minus_inf, b)
    new_max = tl.maximum(a, b)
    # -inf - -inf is NaN: rows without a key on either side are measured from 0.
    finite_max = tl.where(new_max == minus_inf, 0.0, new_max)
    weight_a, weight_b = tl.exp2((a - finite_max) * LOG2E), tl.exp2((b - finite_max) * LOG2E)
    total = weight_a + weight_b
    safe_total = tl.where(total == 0.0, 1.0, total)
    weight_a, weight_b = weight_a / safe_total, weight_b / safe_total

    lanes = tl.arange(0, DV_PAD)
    mask = live[:, None] & (lanes < DV)[None, :]
    offsets = aligned(token * stride_at + head * stride_ah, VEC_A)
    x = tl.load(out_a + offsets[:, None] + lanes[None, :], mask=mask, other=0.0)
    offsets = aligned(token * stride_bt + head * stride_bh, VEC_B)
    y = tl.load(out_b + offsets[:, None] + lanes[None, :], mask=mask, other=0.0)
    # A side without keys may hold anything, and 0 * NaN is NaN.
    x = tl.where(weight_a[:, None] == 0.0, 0.0, x.to(tl.float32) * weight_a[:, None])
    y = tl.where(weight_b[:, None] == 0.0, 0.0, y.to(tl.float32) * weight_b[:, None])
    offsets = aligned(token * stride_ot + head * stride_oh, VEC_O)
    target = out + offsets[:, None] + lanes[None, :]
    tl.store(target, (x + y).to(out.dtype.element_ty), mask=mask)
    if HAS_LSE:
        merged = tl.where(total == 0.0, minus_inf, finite_max + tl.log2(safe_total) * LN2)
        tl.store(lse + token * stride_lo + head, merged, mask=live)


@triton.jit(
    do_not_specialize="""
        stride_ot stride_oh stride_lo stride_pt stride_ph stride_lp
    """.split(),
)
def merge_partial_rows_kernel(
    out, lse, partial_out, partial_lse, partial_starts, partial_rows, num_heads, stride_ot,
    stride_oh, stride_lo, stride_pt, stride_ph, stride_lp, DV: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr, VEC_O: tl.constexpr,
    VEC_P: tl.constexpr,
):  # fmt: skip
    """Merge the partial states of one token into its own state. Grid: (tokens, blocks of heads).

    The states are read STEP at a time, with the running maximum of an online softmax: their number
    differs between tokens.
    """
    if PDL:
        # Started early; nothing may be read before the kernels of the states have ended.
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    first, end = tl.load(partial_starts + token), tl.load(partial_starts + token + 1)
    if first < end:
        head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        live = head < num_heads
        minus_inf = float("-inf")
        lanes = tl.arange(0, DV_PAD)
        mask = live[:, None] & (lanes < DV)[None, :]
        top = tl.load(lse + token * stride_lo + head, mask=live, other=minus_inf)
        top = tl.where(top == float("inf"), minus_inf, top)
        offsets = aligned(token * stride_ot + head * stride_oh, VEC_O)
        target = out + offsets[:, None] + lanes[None, :]
        total = tl.where(top == minus_inf, 0.0, 1.0)
        acc = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        # A state without keys may hold anything, and 0 * NaN is NaN.
        acc = tl.where(total[:, None] == 0.0, 0.0, acc)
        for base in range(first, end, STEP):
            entry = base + tl.arange(0, STEP)
            row = tl.load(partial_rows + entry, mask=entry < end, other=0).to(tl.int64)
            found = (entry < end)[:, None] & live[None, :]
            part = tl.load(
                partial_lse + (row * stride_lp)[:, None] + head[None, :],
                mask=found,
                other=minus_inf,
            )
            source = partial_out + aligned(row * stride_pt, VEC_P)[:, None]
            source = source + aligned(head * stride_ph, VEC_P)[None, :]
            x = tl.load(
                source[:, :, None] + lanes[None, None, :],
                mask=found[:, :, None] & (lanes < DV)[None, None, :],
                other=0.0,
            ).to(tl.float32)
            part = tl.where(part == float("inf"), minus_inf, part)
            new_top = tl.maximum(top, tl.max(part, 0))
            finite_top = tl.where(new_top == minus_inf, 0.0, new_top)
            keep = tl.exp2((top - finite_top) * LOG2E)
            weight = tl.exp2((part - finite_top[None, :]) * LOG2E)
            x = tl.where(weight[:, :, None] == 0.0, 0.0, x * weight[:, :, None])
            acc = acc * keep[:, None] + tl.sum(x, 0)
            total = total * keep + tl.sum(weight, 0)
            top = new_top
        safe_total = tl.where(total == 0.0, 1.0, total)
        tl.store(target, (acc / safe_total[:, None]).to(out.dtype.element_ty), mask=mask)
        merged = tl.where(total == 0.0, minus_inf, top + tl.log2(safe_total) * LN2)
        tl.store(lse + token * stride_lo + head, merged, mask=live)
