"""Which tensors the Hopper kernels can read, given a layer that they support."""

from __future__ import annotations

from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.scales import MIN_LATE_SCALE

__all__ = ["are_readable", "unsupported_strides"]


def unsupported_strides(**tensors: Tensor) -> list[str]:
    """Why tensors cannot be read in units of 16 bytes, given aligned addresses; by their names."""
    reasons = []
    for name, tensor in tensors.items():
        strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        for dim, (size, stride) in enumerate(strides):
            elements = 16 // tensor.element_size()
            if size > 1 and (stride % elements or stride <= 0):
                reasons.append(
                    f"{name} has stride {stride} in dimension {dim}; the Hopper kernels need a "
                    f"multiple of {elements}"
                )
        if tensor.stride(-1) != 1:
            reasons.append(f"{name} has last stride {tensor.stride(-1)}; the Hopper kernels need 1")
    return reasons


def are_readable(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, params: AttentionParams
) -> bool:
    """Whether strides, dtypes and scales of a call allow the Hopper kernels, and the pool has
    pages. The kernels apply the softmax scale to masked scores and to their maximum, so it must be
    positive."""
    # `hopper_reads` has checked the formats of pages that hold scales.
    equal_formats = value.dtype == key.dtype or params.scales_in_page
    has_v_scale = isinstance(params.v_scale, Tensor) or params.v_scale != 1.0
    return (
        not unsupported_strides(query=query, key_cache=key, value_cache=value, out=out)
        and key.shape[0] > 0
        and equal_formats
        and _are_whole_scales(params)
        and out.dtype == query.dtype
        and params.scale >= MIN_LATE_SCALE
        and (key.dtype.itemsize == 1 or not has_v_scale)
    )


def _are_whole_scales(params: AttentionParams) -> bool:
    """Whether the scales of a head in a page, which are loaded as one number, start at a multiple
    of its size, and are a whole number of such numbers from each other."""
    sides = [x for x in (params.k_scale, params.v_scale) if isinstance(x, Tensor) and x.dim() == 4]
    return not any(
        side.data_ptr() % (side.shape[3] * side.element_size())
        or any(
            size > 1 and stride % side.shape[3]
            for size, stride in zip(side.shape[:3], side.stride()[:3], strict=True)
        )
        for side in sides
    )
