"""The launches of a decode over the paged cache: the Hopper decode, or the plain kernels.

One program per (group of heads, split, request). A long request's keys are split over several
programs; their partial results (float32, in the workspace) are combined by a second kernel. A
request with one split is written directly. The packing of query heads into rows follows
FlashAttention's GQA packing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attnlib.errors import ContractError
from attnlib.ops.triton import hopper
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.decode_schedule import (
    DecodeSchedule,
    decode_tiling,
)
from attnlib.ops.triton.heuristics.device import programmatic_launch
from attnlib.ops.triton.heuristics.splits import (
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
)
from attnlib.ops.triton.hopper.sizes import hopper_reads
from attnlib.ops.triton.kernels.decode import decode_kernel
from attnlib.ops.triton.launch.attention import PlainAttention
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.constants import page_strides
from attnlib.ops.triton.launch.partials import Partials
from attnlib.ops.triton.launch.run import PreparedAttention, find_launches
from attnlib.ops.triton.quantized_pages import element_constants

__all__ = ["Decode", "PlainDecode"]

_MAX_REQUESTS = 65534
"""Limit of a grid's third dimension, less the programs for rows past the last request."""


class Decode(NamedTuple):
    """The Hopper decode where the schedule prefers it and it supports the call, else the plain
    kernels."""

    schedule: DecodeSchedule

    def launch_key(self, call: AttentionCall) -> tuple[Any, ...]:
        """See `KernelFamily`."""
        return ("decode", self.schedule)

    def prepare_launches(self, call: AttentionCall) -> PreparedAttention:
        """See `KernelFamily`."""
        schedule = self.schedule
        prepared: PreparedAttention | None = None
        if (
            schedule.uses_hopper
            and hopper_reads(call.shape.page_format, call.shape.value_format)
            and (dispatch := hopper.load()) is not None
        ):
            prepared = dispatch.select_decode(call, schedule)
        return find_launches(PlainDecode(schedule), call) if prepared is None else prepared


class PlainDecode(NamedTuple):
    """The plain kernels, which also read unaligned tensors and need less workspace."""

    schedule: DecodeSchedule

    def launch_key(self, call: AttentionCall) -> tuple[Any, ...]:
        """See `KernelFamily`."""
        return ("plain decode", self.schedule[:4])

    def prepare_launches(self, call: AttentionCall) -> PreparedAttention:
        """See `KernelFamily`.

        Raises:
            ContractError: also for too many requests for one grid.
        """
        return _plain_launch(call, self.schedule)


def _plain_launch(call: AttentionCall, schedule: DecodeSchedule) -> PlainAttention:
    """The launches of the plain kernels."""
    if call.num_reqs > _MAX_REQUESTS:
        raise ContractError(
            f"a decode batch of {call.num_reqs} requests exceeds the limit of {_MAX_REQUESTS}; "
            "split it into several calls"
        )
    shape, num_splits = call.shape, schedule.num_splits
    work = None if shape.page_format is not None else schedule.keys_per_sm
    tiling = decode_tiling(shape, call.limits, schedule.max_query_len, work)
    overlap = programmatic_launch(call.limits)
    partials = Partials.of_splits(
        num_splits,
        *(call.num_tokens, shape.num_heads, shape.head_size_v),
        has_sink=call.params.sink_kind,
        has_lse=call.lse is not None,
        overlap=overlap,
    )
    splits = {
        "SPLIT": num_splits > 1,
        "BALANCED": schedule.balanced,
        "MIN_TILES": MIN_TILES_PER_SPLIT,
        "MAX_SPLITS": MAX_SPLITS,
    }
    constants = {
        "ONE_LOOP": True,
        **element_constants(call, tiling.tile),
        **tiling.packing,
        **overlap,
        **splits,
        **tiling.tile.constants,
    }
    grid = (tiling.ctas, num_splits, call.num_reqs + 1)
    waves = tiling.ctas / tiling.max_resident_ctas
    return PlainAttention(
        call,
        BoundLaunch(decode_kernel, grid, with_config(constants)),
        (num_splits, waves, shape.num_heads, *page_strides(call)),
        partials,
    )
