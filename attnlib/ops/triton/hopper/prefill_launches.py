"""The launch of a Hopper prefill: argument order, descriptors, and memory of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.hopper_tiles import HopperTile, choose_l2_heads
from attnlib.ops.triton.hopper.descriptors import (
    CacheView,
    QueryView,
    TransposedView,
    descriptor_arguments,
)
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS
from attnlib.ops.triton.hopper.prefill_descriptors import PrefillDescriptors
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.partials import Partials
from attnlib.ops.triton.launch.score import batch_score_values, score_arguments
from attnlib.ops.triton.launch.sequence import (
    KEY_CACHE,
    KEY_MAP,
    LSE,
    OUT,
    QUERY,
    QUERY_MAP,
    SINKS,
    VALUE_CACHE,
    VALUE_MAP,
    Launches,
    Source,
    batch_sources,
    bind_step,
    score_sources,
)

__all__ = ["HopperPrefill"]

_FEW_TILES_PER_SM = 4
"""Work tiles per multiprocessor up to which all KV heads are worked on at a time. Groups of heads
order the work tiles of all requests several times, and the last of few may be a long one."""

_NUM_BATCH_VALUES = 5
"""Values of a batch that the kernel takes, besides those of its score function."""


@dataclass(frozen=True, eq=False)
class HopperPrefill:
    """The launch of one call signature of the Hopper prefill, without addresses.

    Attributes:
        limits: the chip that tile and grid were chosen for.
        index: the device index.
        tile: tile shape, pipeline stages and grid policy.
        num_kv_heads: Hkv.
        shared: work tiles with the same query tokens and KV head, each with other query heads.
        views: the key and value cache as TMA reads them.
        query_view: the queries as TMA reads them; None where the kernel loads queries itself.
        scale: softmax scale; times `k_scale` where the cache is not quantized.
        scales: which scales of the cache each call gives: those that are not part of `scale`.
        score_sizes: sizes of the layer tensors of the score function.
        numbers: the runtime numbers between the scale and `concurrent`.
        last: the runtime numbers after `l2_heads`.
        attend: the kernel.
        num_batch_tensors: number of batch tensors of the score function.
        totals_bytes: global memory of the batch-invariant kernel for sums, 0 for none; None for the
            other kernels.
        key_parts, value_parts: parts of a key and of a value in shared memory, each as wide as a
            TMA box.
        num_work_tiles: work tiles, an upper bound.
        gathers: the kernel reads the caches by address instead of descriptors.
        cache_strides: the kernel's last arguments: strides of keys and values in bytes, where
            it gathers their rows, None where it could; empty for kernels that cannot.
        partials: how keys are divided over work tiles, and the kernel that combines them.
        combine_tail: the numbers of that kernel after the number of splits.
    """

    limits: DeviceLimits
    index: int
    tile: HopperTile
    num_kv_heads: int
    shared: int
    views: tuple[CacheView, CacheView | TransposedView]
    query_view: QueryView | None
    scale: float
    scales: tuple[Source | None, Source | None]
    score_sizes: tuple[int, ...]
    numbers: tuple[float | int, ...]
    last: tuple[int, ...]
    attend: BoundLaunch
    num_batch_tensors: int = 0
    totals_bytes: int | None = None
    key_parts: int = 1
    value_parts: int = 1
    num_work_tiles: int = 0
    gathers: bool = False
    cache_strides: tuple[int | None, ...] = ()
    partials: Partials | None = None
    combine_tail: tuple[int, ...] = ()

    needs_alignment: ClassVar[bool] = True
    """TMA requires aligned tensors, also for launches by Triton."""
    as_bytes: ClassVar[bool] = False

    @cached_property
    def kernels(self) -> tuple[BoundLaunch, ...]:
        """The kernels that `run` launches."""
        combine = None if self.partials is None else self.partials.combine
        return (self.attend,) if combine is None else (self.attend, combine)

    @cached_property
    def scratch_bytes(self) -> int:
        """Global memory of a batch: for sums, or for the results of splits."""
        return self.totals_bytes or self.workspace_bytes

    @cached_property
    def workspace_bytes(self) -> int:
        """Bytes of the results of splits."""
        return 0 if self.partials is None else self.partials.workspace_bytes

    @cached_property
    def num_batch_values(self) -> int:
        """Values of a batch."""
        return _NUM_BATCH_VALUES + bool(self.scratch_bytes) + 3 * self.num_batch_tensors

    def launches(
        self,
        direct: bool,
        aligned: bool = True,
        concurrent: bool = False,
        maps: tuple[Source, Source] | None = None,
    ) -> Launches:
        """The launch. The order of the kernel's arguments is written here.

        Args:
            direct: launch without Triton, on addresses.
            aligned: for launches by Triton, whether all tensors are aligned.
            concurrent: start while the kernel launched before still runs. That kernel must release
                its successor early and must have waited for everything before itself.
            maps: values of a batch that are the descriptors of keys and values; None for those of
                the caches of a call.
        """
        starts, lens, table, counters, l2_heads = batch_sources(_NUM_BATCH_VALUES)
        space = batch_sources(1, _NUM_BATCH_VALUES) if self.scratch_bytes else (None,)
        totals: tuple[Any, ...] = () if self.totals_bytes is None else space
        split, last = self.partials, self.cache_strides
        if last:  # of the general kernel
            last = (*last, *((None, None) if split is None else (*space, split.num_splits)))
        pointers, sizes = score_arguments(
            self.score_sizes, self.num_batch_tensors, _NUM_BATCH_VALUES
        )
        layer_tensors = score_sources(len(self.score_sizes) // 2)
        caches: tuple[Any, ...] = (KEY_CACHE, VALUE_CACHE)
        if not self.gathers:
            caches = descriptor_arguments(self.views, maps or (KEY_MAP, VALUE_MAP), direct)
        query_map: tuple[Any, ...] = (None,)
        if self.query_view is not None:
            query_map = descriptor_arguments((self.query_view,), (QUERY_MAP,), direct)
        arguments = (
            *caches, *query_map, QUERY, OUT, LSE, SINKS, *self.scales, *layer_tensors, *pointers,
            starts, lens, table, counters, *totals, self.scale, *self.numbers, int(concurrent),
            l2_heads, *self.last, *sizes, *last,
        )  # fmt: skip
        step = bind_step(self.attend, direct, aligned, arguments)
        steps = [step]
        if split is not None and split.combine is not None:
            combined = (space[0], SINKS, OUT, LSE, split.num_splits, *self.combine_tail)
            steps.append(bind_step(split.combine, direct, aligned, combined))
        return Launches(tuple(steps), self._descriptors.lookups(direct, maps is None))

    @cached_property
    def direct(self) -> Launches:
        """The direct launches, made once."""
        return self.launches(True)

    def with_scratch(self, batch: BatchTensors) -> BatchTensors:
        """The batch, with memory of `scratch_bytes`, and counters for a persistent kernel."""
        held = 0 if self.totals_bytes or batch.workspace is None else batch.workspace.nbytes
        if self.scratch_bytes > held:
            device = batch.query_start_loc.device
            space = torch.empty(self.scratch_bytes // 4, dtype=torch.float32, device=device)
            batch = batch._replace(workspace=space)
        counters = batch.counters
        if not self.tile.persistent or (
            counters is not None and counters.numel() >= PREFILL_COUNTERS
        ):
            return batch
        device = batch.query_start_loc.device
        counters = torch.zeros(PREFILL_COUNTERS, dtype=torch.int32, device=device)
        return batch._replace(counters=counters)

    def addresses(self, batch: BatchTensors) -> tuple[Any, ...] | None:
        """The values of a batch for direct launches; None if its counters or its workspace are not
        aligned."""
        table, score, counters = batch.block_table, batch.score_tensors, None
        assert table is not None
        if self.tile.persistent:
            assert batch.counters is not None  # see `with_scratch`
            counters = batch.counters.data_ptr()
        scratch: tuple[int, ...] = ()
        specialized = counters or 0
        if self.scratch_bytes:
            assert batch.workspace is not None  # see `with_scratch`
            scratch = (batch.workspace.data_ptr(),)
            specialized |= scratch[0]
        if specialized & ALIGNMENT:
            return None
        return (
            batch.query_start_loc.data_ptr(), batch.seq_lens.data_ptr(), table.data_ptr(),
            counters, self._l2_heads(batch.max_seq_len), *scratch,
            *(batch_score_values(score, True) if score else ()),
        )  # fmt: skip

    def tensors(self, batch: BatchTensors) -> tuple[Any, ...]:
        """The values of a batch for launches by Triton."""
        space: tuple[Any, ...] = ()
        if self.scratch_bytes:
            assert batch.workspace is not None  # see `with_scratch`
            space = (batch.workspace.view(torch.float32),)
        return (
            batch.query_start_loc, batch.seq_lens, batch.block_table,
            batch.counters if self.tile.persistent else None, self._l2_heads(batch.max_seq_len),
            *space,
            *batch_score_values(batch.score_tensors, False),
        )  # fmt: skip

    def _l2_heads(self, max_seq_len: int) -> int:
        """KV heads that are worked on at a time, times the work tiles that share one."""
        heads, (key_view, value_view) = self.num_kv_heads, self.views
        if self.tile.l2_groups and self.num_work_tiles >= _FEW_TILES_PER_SM * self.limits.num_sms:
            width = self.key_parts * key_view.width
            width_v = width
            if not isinstance(value_view, TransposedView):
                width_v = self.value_parts * value_view.width
            heads = choose_l2_heads(heads, max_seq_len, width + width_v)
        return heads * self.shared

    @cached_property
    def _descriptors(self) -> PrefillDescriptors:
        """The descriptors of queries and caches."""
        return PrefillDescriptors(self.views, self.query_view, self.gathers, self.attend)
