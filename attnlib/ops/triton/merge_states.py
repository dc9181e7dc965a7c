"""Joining two partial attention results over disjoint keys into the result over all of them.

The rule is the one by which a softmax splits: weights are exp(lse - lse_merged). Used for cascades and cached prefixes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnlib.ops.triton.heuristics.device import device_guard, limits_of
from attnlib.ops.triton.kernels.softmax import LN2, LOG2E
from attnlib.ops.triton.launch.bound import BoundLaunch, Remembered

__all__ = ["merge_states"]

_ELEMENTS_PER_PROGRAM = 2048


@triton.jit
def _merge_states_kernel(out_a, lse_a, out_b, lse_b, out, lse, num_heads, stride_at, stride_ah, stride_bt, stride_bh,
                         stride_ot, stride_oh, stride_la, stride_lb, stride_lo, HAS_LSE: tl.constexpr,
                         DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    live = head < num_heads
    minus_inf = float("-inf")
    a = tl.load(lse_a + token * stride_la + head, mask=live, other=minus_inf)
    b = tl.load(lse_b + token * stride_lb + head, mask=live, other=minus_inf)
    a = tl.where(a == float("inf"), minus_inf, a)
    b = tl.where(b == float("inf"), minus_inf, b)
    largest = tl.maximum(a, b)
    anchor = tl.where(largest == minus_inf, 0.0, largest)
    weight_a, weight_b = tl.exp2((a - anchor) * LOG2E), tl.exp2((b - anchor) * LOG2E)
    total = weight_a + weight_b
    safe = tl.where(total == 0.0, 1.0, total)
    weight_a, weight_b = weight_a / safe, weight_b / safe

    lanes = tl.arange(0, DV_PAD)
    mask = live[:, None] & (lanes < DV)[None, :]
    x = tl.load(
        out_a + (token * stride_at + head * stride_ah)[:, None] + lanes[None, :],
        mask=mask,
        other=0.0,
    )
    y = tl.load(
        out_b + (token * stride_bt + head * stride_bh)[:, None] + lanes[None, :],
        mask=mask,
        other=0.0,
    )
    # An empty side may hold anything, and zero times NaN is NaN.
    x = tl.where(weight_a[:, None] == 0.0, 0.0, x.to(tl.float32) * weight_a[:, None])
    y = tl.where(weight_b[:, None] == 0.0, 0.0, y.to(tl.float32) * weight_b[:, None])
    target = out + (token * stride_ot + head * stride_oh)[:, None] + lanes[None, :]
    tl.store(target, (x + y).to(out.dtype.element_ty), mask=mask)
    if HAS_LSE:
        merged = tl.where(total == 0.0, minus_inf, anchor + tl.log2(safe) * LN2)
        tl.store(lse + token * stride_lo + head, merged, mask=live)


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Merge attention over keys A with attention over keys B.

    Args:
        out_a: `[T, Hq, Dv]`, any strides on T and Hq.
        lse_a: `[T, Hq]` float32, natural log, last stride 1; +inf counts as -inf (no key).
        out_b: as `out_a`.
        lse_b: as `lse_a`.
        out: `[T, Hq, Dv]`, written; may be `out_a` or `out_b`. A row that neither side has seen becomes 0.
        lse: `[T, Hq]` float32, written when given; may be `lse_a` or `lse_b`.
    """
    if out.numel() == 0:
        return
    limits_of(out)
    target = lse if lse is not None else lse_a
    tensors = (out_a, lse_a, out_b, lse_b, out, target)
    same = (out.get_device(), out.shape, lse is None, *((x.dtype, x.stride()) for x in tensors))
    launch = _launches.get(same) or _launches.keep(same, _bind(out, lse is not None))
    numbers = (
        out.shape[1], out_a.stride(0), out_a.stride(1), out_b.stride(0), out_b.stride(1), out.stride(0), out.stride(1),
        lse_a.stride(0), lse_b.stride(0), target.stride(0),
    )  # fmt: skip
    addresses = (
        out_a.data_ptr()
        | lse_a.data_ptr()
        | out_b.data_ptr()
        | lse_b.data_ptr()
        | out.data_ptr()
        | target.data_ptr()
    )
    with device_guard(out):
        launch((*tensors, *numbers), addresses, out.get_device())


_launches: Remembered[BoundLaunch] = Remembered()


def _bind(out: Tensor, has_lse: bool) -> BoundLaunch:
    num_tokens, num_heads, head_size_v = out.shape
    padded = triton.next_power_of_2(head_size_v)
    block_h = max(1, min(triton.next_power_of_2(num_heads), _ELEMENTS_PER_PROGRAM // padded))
    constants = {
        "HAS_LSE": has_lse,
        "DV": head_size_v,
        "DV_PAD": padded,
        "BLOCK_H": block_h,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    return BoundLaunch(
        _merge_states_kernel, (num_tokens, triton.cdiv(num_heads, block_h), 1), constants
    )
