"""The runtime numbers and scales of a Hopper prefill."""

from __future__ import annotations

from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.hopper.descriptors import gathered_strides
from attnlib.ops.triton.hopper.prefill_geometry import PrefillGeometry
from attnlib.ops.triton.hopper.sizes import gathers
from attnlib.ops.triton.launch.sequence import K_SCALE, V_SCALE, Source

__all__ = ["cache_strides", "call_strides", "prefill_numbers", "prefill_scales"]

_UNBOUNDED = 1 << 30


def prefill_numbers(call: AttentionCall, sizes: PrefillGeometry) -> tuple[float | int, ...]:
    """The runtime numbers between the scale and `concurrent`."""
    params, (left, right) = call.params, call.params.window
    return (
        float(params.logits_soft_cap),
        min(left, _UNBOUNDED),
        min(right, _UNBOUNDED),
        min(params.attention_chunk_size, _UNBOUNDED),
        call.batch.query_start_loc.shape[0] - 1,
        call.num_tokens,
        sizes.num_tiles,
    )


def call_strides(call: AttentionCall) -> tuple[int, ...]:
    """The runtime numbers after `l2_heads`: blocks of the cache, and strides of queries, outputs,
    LSEs and the block table."""
    strides = (*call.query.stride()[:2], *call.out.stride()[:2], call.lse_stride)
    return (call.key.shape[0], *strides, call.table_stride)


def cache_strides(key: Tensor, value: Tensor) -> tuple[int | None, ...]:
    """See `HopperPrefill.cache_strides`; of the general kernel."""
    return gathered_strides(key, value) if gathers(key.shape[1]) else (None,) * 6


def prefill_scales(
    is_quantized: bool, params: AttentionParams
) -> tuple[float, tuple[Source | None, Source | None]]:
    """The softmax scale with what it includes of `k_scale`, and the scales that calls give."""
    if is_quantized:
        return params.scale, (K_SCALE, V_SCALE)
    # Only copies of a float8 cache have other scales than 1 for the values, or tensors.
    v_scale = None if _is_one(params.v_scale) else V_SCALE
    if isinstance(params.k_scale, Tensor):
        return params.scale, (K_SCALE, v_scale)
    return params.scale * float(params.k_scale), (None, v_scale)


def _is_one(scale: float | Tensor) -> bool:
    return not isinstance(scale, Tensor) and scale == 1.0
