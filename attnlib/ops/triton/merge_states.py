"""Joining two partial attention results over disjoint keys into the result over all of them.

The weight of each part is exp(lse - lse_merged). Used for cascades and cached prefixes.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from attnlib.ops.checks import vector_elements
from attnlib.ops.triton.heuristics.device import (
    device_guard,
    limits_of,
    programmatic_launch,
)
from attnlib.ops.triton.kernels.merge_states import (
    merge_partial_rows_kernel,
    merge_states_kernel,
)
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES

__all__ = ["merge_partial_rows", "merge_states"]

_ELEMENTS_PER_PROGRAM = 2048
_STEP = 8
"""Partial states that a program reads at a time."""
_STEP_ELEMENTS = 512
"""Elements of the output in a program that reads `_STEP` states at a time."""


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
        out: `[T, Hq, Dv]`, written; may be `out_a` or `out_b`. A row without
            keys on either side becomes 0.
        lse: `[T, Hq]` float32, written when given; may be `lse_a` or `lse_b`.
    """
    if out.numel() == 0:
        return
    limits_of(out)
    target = lse if lse is not None else lse_a
    tensors = (out_a, lse_a, out_b, lse_b, out, target)
    layouts = ((x.dtype, x.stride()) for x in tensors)
    key = ("merge states", out.get_device(), out.shape, lse is None, *layouts)
    launch = LAUNCHES.get(key) or LAUNCHES.keep(
        key,
        _launch(
            merge_states_kernel,
            out,
            HAS_LSE=lse is not None,
            VEC_A=vector_elements("out_a", out_a),
            VEC_B=vector_elements("out_b", out_b),
            VEC_O=vector_elements("out", out),
        ),
    )
    numbers = (
        out.shape[1],
        out_a.stride(0),
        out_a.stride(1),
        out_b.stride(0),
        out_b.stride(1),
        out.stride(0),
        out.stride(1),
        lse_a.stride(0),
        lse_b.stride(0),
        target.stride(0),
    )
    addresses = (
        out_a.data_ptr()
        | lse_a.data_ptr()
        | out_b.data_ptr()
        | lse_b.data_ptr()
        | out.data_ptr()
        | target.data_ptr()
    )
    with device_guard(out):
        launch.run((*tensors, *numbers), addresses, out.get_device())


def merge_partial_rows(
    out: Tensor,
    lse: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    partial_starts: Tensor,
    partial_rows: Tensor,
) -> None:
    """Merge any number of partial states into each token's state, in place.

    Args:
        out: `[T, Hq, Dv]`, the first state of each token; overwritten with the merged one.
        lse: `[T, Hq]` float32, likewise. As in `merge_states`, -inf and +inf mean no keys.
        partial_out: `[P, Hq, Dv]`, states over other keys.
        partial_lse: `[P, Hq]` float32.
        partial_starts: `[T + 1]` int32; token t has entries `[starts[t], starts[t + 1])`. A token
            without entries keeps its state.
        partial_rows: `[n]` int32, rows of the partial states, grouped by token.
    """
    if out.numel() == 0 or partial_out.numel() == 0:
        return
    limits = limits_of(out)
    tensors = (out, lse, partial_out, partial_lse, partial_starts, partial_rows)
    layouts = ((x.dtype, x.stride()) for x in tensors)
    key = ("merge partial rows", out.get_device(), out.shape, *layouts)
    launch = LAUNCHES.get(key) or LAUNCHES.keep(
        key,
        _launch(
            merge_partial_rows_kernel,
            out,
            _STEP_ELEMENTS,
            STEP=_STEP,
            VEC_O=vector_elements("out", out),
            VEC_P=vector_elements("partial_out", partial_out),
            **programmatic_launch(limits, out.shape[0] * out.shape[1]),
        ),
    )
    numbers = (
        out.shape[1],
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        partial_out.stride(0),
        partial_out.stride(1),
        partial_lse.stride(0),
    )
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    with device_guard(out):
        launch.run((*tensors, *numbers), addresses, out.get_device())


def _launch(
    kernel: Any, out: Tensor, elements: int = _ELEMENTS_PER_PROGRAM, **constants: object
) -> BoundLaunch:
    """The launch of a kernel with this many elements of the output in a program."""
    num_tokens, num_heads, head_size_v = out.shape
    padded = triton.next_power_of_2(head_size_v)
    block_h = max(1, min(triton.next_power_of_2(num_heads), elements // padded))
    constants |= {
        "DV": head_size_v,
        "DV_PAD": padded,
        "BLOCK_H": block_h,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    return BoundLaunch(kernel, (num_tokens, triton.cdiv(num_heads, block_h), 1), constants)
