"""Batch-invariant attention: launches whose results for a row do not depend on its batch (M15).

One kernel with one tile serves decodes, prefills and packed keys of a layer
(`kernels/invariant.py`). Decodes may divide a request's keys over several programs; bits are the
same as without. On Hopper, Gluon kernels serve the layers that they support
(`hopper/invariant_plan.py`), always or never for a layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton

from attnlib.errors import ContractError
from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton import hopper
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.decode_schedule import DecodeSchedule
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.invariant_tiles import (
    choose_invariant_tile,
    combine_columns,
    count_segments,
    invariant_workspace_bytes,
    segment_keys,
)
from attnlib.ops.triton.heuristics.splits import visible_bound
from attnlib.ops.triton.heuristics.tiles import key_chunks
from attnlib.ops.triton.hopper.common_reasons import CallFeatures
from attnlib.ops.triton.hopper.sizes import INVARIANT_KERNELS, decode_rows
from attnlib.ops.triton.hopper.support import invariant_unsupported_reasons
from attnlib.ops.triton.kernels.invariant import invariant_combine_kernel, invariant_kernel
from attnlib.ops.triton.launch.attention import PlainAttention
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.constants import attention_constants
from attnlib.ops.triton.launch.partials import Partials
from attnlib.ops.triton.launch.run import PreparedAttention

__all__ = [
    "InvariantKernels",
    "visible_segments",
    "workspace_bytes",
]

_STEP = 8
"""Segments that the combine kernel loads at a time."""
_MAX_SEGMENTS = 65535
"""Limit of a grid's third dimension."""


def visible_segments(
    max_query_len: int,
    max_seq_len: int,
    window: tuple[int, int],
    causal: bool,
    attention_chunk_size: int,
    limits: DeviceLimits,
) -> int:
    """Upper bound of the segments that the keys of one request lie in, by upper bounds of the
    lengths; arguments as in `splits.visible_bound`."""
    bounds = max_query_len, max_seq_len, window, causal, attention_chunk_size
    visible = visible_bound(*bounds)
    return count_segments(visible, visible < max_seq_len, limits)


def workspace_bytes(
    shape: LayerShape,
    limits: DeviceLimits,
    num_tokens: int,
    schedule: DecodeSchedule,
    kernels: str,
) -> int:
    """Workspace in bytes of a decode with this schedule.

    Args:
        shape: sizes and dtypes of the layers.
        limits: the chip.
        num_tokens: query tokens.
        schedule: its number of splits is that of the segments.
        kernels: as in `InvariantKernels`.
    """
    plain = invariant_workspace_bytes(
        num_tokens, shape.num_heads, shape.head_size_v, schedule.num_splits
    )
    if limits.capability[0] != 9 or kernels not in INVARIANT_KERNELS or shape.latent:
        return plain
    reasons = invariant_unsupported_reasons(shape, CallFeatures(), limits)
    rows = shape.group * schedule.max_query_len
    if reasons or rows > decode_rows(shape.head_size_v) or hopper.load() is None:
        return plain
    # Tensors may still require the plain kernel, which is found when a plan is made: it allocates.
    from attnlib.ops.triton.hopper.invariant_plan import hopper_invariant_bytes

    return hopper_invariant_bytes(
        num_tokens,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_size_v,
        schedule.max_query_len,
        schedule.num_splits,
        limits,
    )


class InvariantKernels(NamedTuple):
    """The Gluon kernels where they are wanted and support the layer, else the plain kernel. Over
    pages, or over packed keys.

    Attributes:
        kernels: one of `hopper.sizes.INVARIANT_KERNELS` uses the Gluon kernels where they
            support the layer.
        num_segments: upper bound of the segments of a request (`visible_segments`), over which a
            decode is divided; None for a prefill, where one program adds all segments.
        max_ctas: CTAs of the Hopper decode, where a prefill runs concurrently; None means all.
    """

    kernels: str = "auto"
    num_segments: int | None = None
    max_ctas: int | None = None

    @classmethod
    def of_decode(cls, call: AttentionCall, kernels: str) -> InvariantKernels:
        """The kernels of a decode that was called without metadata."""
        params, batch = call.params, call.batch
        bounds = (batch.max_query_len, batch.max_seq_len)
        causal, chunk = params.causal is True, params.attention_chunk_size
        return cls(kernels, visible_segments(*bounds, params.window, causal, chunk, call.limits))

    def launch_key(self, call: AttentionCall) -> tuple[Any, ...]:
        """See `KernelFamily`. Prefills do not depend on the query length."""
        query_len = None if self.num_segments is None else call.max_query_len
        return ("invariant", call.is_paged, query_len, *self)

    def prepare_launches(self, call: AttentionCall) -> PreparedAttention:
        """See `KernelFamily`.

        Raises:
            ContractError: also for sequences with too many segments.
        """
        limits, num_segments = call.limits, self.num_segments
        if num_segments is not None and num_segments > _MAX_SEGMENTS:
            raise ContractError(
                f"a decode of sequences with {num_segments} segments of {segment_keys(limits)} "
                f"keys exceeds the limit of {_MAX_SEGMENTS}; lower max_seq_len"
            )
        wanted = limits.capability[0] == 9 and self.kernels in INVARIANT_KERNELS
        prepared: PreparedAttention | None = None
        if wanted and (dispatch := hopper.load()) is not None:
            prepared = dispatch.select_invariant(call, num_segments, self.max_ctas)
        return _prepare_plain(call, num_segments or 1) if prepared is None else prepared


def _prepare_plain(call: AttentionCall, num_segments: int) -> PlainAttention:
    """The launches of the plain kernel."""
    constants, shape, limits = attention_constants(call), call.shape, call.limits
    element = shape.query_dtype.itemsize
    tile = choose_invariant_tile(shape, limits)
    tile_heads = min(shape.group, tile.block_m)
    tile_tokens, head_blocks = tile.block_m // tile_heads, triton.cdiv(shape.group, tile_heads)
    constants |= {
        "PAGED": call.is_paged,
        "SPLIT": num_segments > 1,
        "SEGMENT": segment_keys(limits),
        **key_chunks(shape.head_sizes, tile, element, limits.products, shape.latent),
        "TILE_HEADS": tile_heads,
        "TILE_TOKENS": tile_tokens,
        "HEAD_BLOCKS": head_blocks,
        **tile.constants,
    }
    num_tiles = call.num_tokens // tile_tokens + call.batch.query_start_loc.shape[0]
    grid = (num_tiles, shape.num_kv_heads * head_blocks, num_segments)
    sizes = (call.num_tokens, shape.num_heads, shape.head_size_v)
    return PlainAttention(
        call,
        BoundLaunch(invariant_kernel, grid, with_config(constants)),
        (num_tiles, num_segments, shape.num_heads),
        Partials(
            num_segments,
            _combine(call) if num_segments > 1 else None,
            invariant_workspace_bytes(*sizes, num_segments),
        ),
    )


def _combine(call: AttentionCall) -> BoundLaunch:
    """The launch of the kernel that adds segments."""
    size = call.shape.head_size_v
    columns = combine_columns(size)
    constants = {
        "HAS_SINK": call.params.sink_kind,
        "HAS_LSE": call.lse is not None,
        "DV": size,
        "COLUMNS": columns,
        "STEP": _STEP,
        "num_warps": 1,
        "enable_fp_fusion": True,
    }
    grid = (call.num_tokens, call.shape.num_heads, triton.cdiv(size, columns))
    return BoundLaunch(invariant_combine_kernel, grid, constants)
