"""What the Hopper decodes need for layers of a shape: support, workspace and counters. Builders ask
before there is a call. Kernels of latents and of shared prefixes are imported where a layer needs
them."""

from __future__ import annotations

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.hopper_decode_tiles import MAX_CONSUMERS, MAX_WARPS
from attnlib.ops.triton.hopper.common_reasons import CallFeatures
from attnlib.ops.triton.hopper.decode_grid import hopper_decode_workspace_bytes
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS
from attnlib.ops.triton.hopper.sizes import WARP_ROWS
from attnlib.ops.triton.hopper.support import (
    decode_unsupported_reasons,
    latent_unsupported_reasons,
    shared_decode_unsupported_reasons,
)

__all__ = ["decode_workspace_bytes", "num_counters", "shared_decode_shape", "supports_decode"]


def num_counters(limits: DeviceLimits) -> int:
    """Counters (int32 zeros) that a step's Hopper kernels use."""
    return PREFILL_COUNTERS + MAX_CONSUMERS * limits.num_sms


def supports_decode(shape: LayerShape, limits: DeviceLimits, max_query_len: int) -> bool:
    """Whether the Hopper decode supports such layers.

    Args:
        shape: sizes and dtypes of the layer.
        limits: the chip.
        max_query_len: upper bound of the query lengths, in tokens.
    """
    features = CallFeatures()
    if shape.latent:
        return not latent_unsupported_reasons(shape, features, limits)
    return not decode_unsupported_reasons(shape, features, limits, max_query_len)


def shared_decode_shape(shape: LayerShape, limits: DeviceLimits) -> tuple[int, int] | None:
    """(Keys of a tile, ranges) of the decode of shared prefixes; None where it does not support
    such layers.

    Args:
        shape: sizes and dtypes of the layer.
        limits: the chip.
    """
    if shape.latent or shared_decode_unsupported_reasons(shape, limits):
        return None
    from attnlib.ops.triton.hopper import shared_decode_plan

    ranges = shared_decode_plan.shared_decode_ranges(shape.num_kv_heads, limits.num_sms)
    return shared_decode_plan.shared_decode_tile(*shape.head_sizes).block_n, ranges


def decode_workspace_bytes(
    shape: LayerShape, limits: DeviceLimits, num_tokens: int, max_query_len: int
) -> int:
    """Bytes of workspace of the Hopper decode.

    Args:
        shape: sizes and dtypes of the layer.
        limits: the chip.
        num_tokens: query tokens of the step.
        max_query_len: upper bound of the query lengths, in tokens.
    """
    if shape.latent:
        from attnlib.ops.triton.hopper.latent_plan import latent_decode_workspace_bytes

        return latent_decode_workspace_bytes(
            num_tokens,
            shape.num_heads,
            max_query_len,
            limits.num_sms,
            shape.cache_dtype.itemsize == 1,
        )
    return hopper_decode_workspace_bytes(
        num_tokens,
        shape.num_kv_heads,
        shape.group,
        max_query_len,
        shape.head_size_v,
        limits.num_sms,
        _most_workers(shape, max_query_len),
    )


def _most_workers(shape: LayerShape, max_query_len: int) -> int:
    """Consumers of the Hopper decode on a multiprocessor, at most."""
    if shape.cache_dtype.itemsize != 1:
        return 1
    return MAX_WARPS if shape.group * max_query_len <= WARP_ROWS else MAX_CONSUMERS
