"""The launches of a Hopper decode, bound to everything but addresses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from attnlib.kv_rotation import KVRotation
from attnlib.ops.split_states import SplitStates
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.hopper.descriptors import (
    CacheView,
    described,
    descriptor_arguments,
    encode_views,
    encoded_descriptors,
)
from attnlib.ops.triton.hopper.packed_views import PackedKeyView, PackedValueView
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.cache import LaunchCache
from attnlib.ops.triton.launch.score import batch_score_values, score_arguments
from attnlib.ops.triton.launch.sequence import (
    K_SCALE,
    KEY_CACHE,
    KEY_MAP,
    LSE,
    OUT,
    QUERY,
    SINKS,
    V_SCALE,
    VALUE_CACHE,
    VALUE_MAP,
    Launches,
    Lookup,
    Source,
    batch_sources,
    bind_step,
    score_sources,
)

__all__ = ["PDL_OPTIONS", "HopperDecode", "call_numbers", "unbounded"]

PDL_OPTIONS = {"enable_fp_fusion": True, "launch_pdl": True}
"""Options of all kernels: a kernel may start before the previous one has ended."""

_NUM_BATCH_VALUES = 7
"""Values of a batch that the kernels take, besides those of its score function."""
_UNBOUNDED = 1 << 30
_NO_PARTIALS: tuple[Any, ...] = (None, None, None)
"""Partial results of launches without splits."""


def unbounded(number: int) -> int:
    """A side of a window or a chunk as the kernels take it; larger numbers have no effect."""
    return min(number, _UNBOUNDED)


def call_numbers(call: AttentionCall, num_blocks: int, rows: int) -> tuple[float | int, ...]:
    """The runtime numbers of a decode kernel from its soft cap to the stride of the block table.

    Args:
        num_blocks: blocks of the cache.
        rows: query heads of a group times the largest query length.
    """
    query, out, params = call.query, call.out, call.params
    limits = (*params.window, params.attention_chunk_size)
    sizes = (call.batch.num_decodes, call.num_tokens, num_blocks, rows)
    strides = (*query.stride()[:2], *out.stride()[:2], call.lse_stride, call.table_stride)
    return (float(params.logits_soft_cap), *map(unbounded, limits), *sizes, *strides)


@dataclass(frozen=True, eq=False)
class HopperDecode:
    """The launches of one call signature of the Hopper decode, without addresses.

    Attributes:
        limits: the chip that tile and grid were chosen for.
        index: the device index.
        views: the key and value cache as TMA reads them.
        packed: whether they are the packed caches of vLLM's PagedAttention. Requests have one query
            token each then, and `query_start_loc` of a batch is not read.
        scale: softmax scale; times `k_scale` where the cache is not quantized.
        is_quantized: whether the cache has elements of 8 bits.
        numbers: the attention kernel's runtime numbers after its scale.
        score_sizes: sizes of the layer tensors of the score function.
        combine_tail: the combine kernel's runtime numbers.
        lse_offset, header_offset: in the workspace, in float32 elements, after the partial outputs.
        workspace_bytes: size of the workspace.
        attend: the attention kernel.
        combine: the combine kernel; None where the attention kernel combines.
        num_batch_tensors: number of batch tensors of the score function.
        last_strides: the kernel's last arguments. Strides of blocks, positions and heads, of the
            keys and of the values: those of the scales in the pages (M16), or of the caches in
            bytes where the kernel gathers their rows; else None. Other kernels have
            other strides or none.
        gathers: the kernel reads the caches by address instead of descriptors.
        key_address: what it takes after the descriptors, the address of the keys or None.
        takes_scores: it takes tensors of a score function and counters.
        rotated: what the kernels rotate, queries, and outputs back (P15); else None.
        split_rows: rows of partial results that the caller combines (`splits`); else 0.
    """

    limits: DeviceLimits
    index: int
    views: tuple[CacheView, CacheView] | tuple[PackedKeyView, PackedValueView]
    packed: bool
    scale: float
    is_quantized: bool
    score_sizes: tuple[int, ...]
    numbers: tuple[float | int, ...]
    combine_tail: tuple[int | None, ...]
    lse_offset: int
    header_offset: int
    workspace_bytes: int
    attend: BoundLaunch
    combine: BoundLaunch | None
    num_batch_tensors: int = 0
    last_strides: tuple[int | None, ...] = (None,) * 6
    gathers: bool = False
    key_address: tuple[Source | None, ...] = ()
    takes_scores: bool = True
    rotated: KVRotation | None = None
    split_rows: int = 0

    needs_alignment: ClassVar[bool] = True
    """TMA and 16-byte loads require aligned tensors, also for launches by Triton."""
    as_bytes: ClassVar[bool] = False

    @property
    def kernels(self) -> tuple[BoundLaunch, ...]:
        """The kernels that `run` launches."""
        return (self.attend,) if self.combine is None else (self.attend, self.combine)

    @property
    def num_batch_values(self) -> int:
        """The number of values of a batch."""
        return _NUM_BATCH_VALUES + 3 * self.num_batch_tensors

    def launches(self, direct: bool, aligned: bool = True) -> Launches:
        """The launches of both kernels. The order of their arguments is written here.

        Args:
            direct: launch without Triton, on addresses.
            aligned: for launches by Triton, whether all tensors are aligned.
        """
        caches, maps = (KEY_CACHE, VALUE_CACHE), (KEY_MAP, VALUE_MAP)
        lookups: tuple[Lookup, ...] = ()
        sources: tuple[Any, ...] = caches
        if not self.gathers:
            sources = descriptor_arguments(self.views, maps, direct)
            sources = (*sources, *self.key_address)
            lookups = (
                Lookup(caches, self._descriptors, self._encode, maps)
                if direct
                else described(self.views, caches, maps),
            )
        starts, lens, table, outputs, lses, headers, counters = batch_sources(_NUM_BATCH_VALUES)
        pointers, sizes = score_arguments(
            self.score_sizes, self.num_batch_tensors, _NUM_BATCH_VALUES
        )
        layer_tensors = score_sources(len(self.score_sizes) // 2)
        scales = (K_SCALE, V_SCALE) if self.is_quantized else (None, None)
        extras: tuple[Any, ...] = (*scales, *layer_tensors, *pointers)
        space: tuple[Any, ...] = (outputs, lses, headers, counters)
        if not self.takes_scores:
            extras, space, sizes = scales, space[:3], ()
        tensors = (*sources, QUERY, OUT, LSE, SINKS, *extras)
        numbers = (self.scale, *self.numbers, *sizes, *self.last_strides)
        arguments = (*tensors, starts, lens, table, *space, *numbers)
        steps = [bind_step(self.attend, direct, aligned, arguments)]
        if self.combine is not None:
            arguments = (outputs, lses, headers, starts, SINKS, OUT, LSE, *self.combine_tail)
            steps.append(bind_step(self.combine, direct, aligned, arguments))
        return Launches(tuple(steps), lookups)

    @cached_property
    def direct(self) -> Launches:
        """The direct launches, made once."""
        return self.launches(True)

    def with_scratch(self, batch: BatchTensors) -> BatchTensors:
        """The batch, with a workspace of `workspace_bytes`: without counters the combine kernel
        runs."""
        held = 0 if batch.workspace is None else batch.workspace.nbytes
        if held >= self.workspace_bytes:
            return batch
        device = batch.query_start_loc.device
        space = torch.empty(self.workspace_bytes // 4, dtype=torch.float32, device=device)
        return batch._replace(workspace=space)

    def addresses(self, batch: BatchTensors) -> tuple[Any, ...] | None:
        """The values of a batch for direct launches; None if its workspace is not aligned.
        `workspace` holds at least `workspace_bytes`."""
        starts, lens, table, _, _, space, counters = batch[:7]
        assert table is not None
        score, partials = batch.score_tensors, _NO_PARTIALS
        if self.workspace_bytes:
            assert space is not None
            outputs = space.data_ptr()
            if outputs & ALIGNMENT:
                return None
            partials = (outputs, outputs + 4 * self.lse_offset, outputs + 4 * self.header_offset)
        lists = (None if self.packed else starts.data_ptr(), lens.data_ptr(), table.data_ptr())
        combines = self.combine is not None or self.split_rows  # another kernel, without counters
        counted = None if counters is None or combines else counters.data_ptr()
        return (*lists, *partials, counted, *(batch_score_values(score, True) if score else ()))

    def tensors(self, batch: BatchTensors) -> tuple[Any, ...]:
        """The values of a batch for launches by Triton."""
        space, partials = batch.workspace, _NO_PARTIALS
        if self.workspace_bytes:
            assert space is not None
            space = space.view(torch.float32)
            headers = space[self.header_offset :].view(torch.int32)
            partials = (space, space[self.lse_offset :], headers)
        starts = None if self.packed else batch.query_start_loc
        counters = None if self.combine is not None or self.split_rows else batch.counters
        lists = (starts, batch.seq_lens, batch.block_table)
        scores = batch_score_values(batch.score_tensors, False)
        return (*lists, *partials, counters, *scores)

    def splits(self, batch: BatchTensors) -> SplitStates | None:
        """The splits of a batch, with a workspace, that has run; None if they are combined."""
        if not self.split_rows or batch.workspace is None:
            return None
        space = batch.workspace.view(torch.float32)
        parts = space[: self.lse_offset], space[self.lse_offset : self.header_offset]
        headers = space[self.header_offset :].view(torch.int32)
        return SplitStates(*parts, headers, batch.query_start_loc, self.split_rows)

    @cached_property
    def _descriptors(self) -> LaunchCache:
        """Encoded descriptors of caches like this one; known once the kernel has been launched."""
        return encoded_descriptors(self.views, self.attend)

    def _encode(self, key: int, value: int) -> tuple[Any, ...]:
        """Encode and keep the descriptors of the caches at these addresses."""
        return encode_views(self._descriptors, self.attend, self.views, (key, value))
