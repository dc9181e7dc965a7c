"""The launches of the portable attention kernels for one call signature, without addresses."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.constants import attention_numbers, reads_bytes
from attnlib.ops.triton.launch.partials import Partials
from attnlib.ops.triton.launch.score import batch_score_values, score_arguments, tensor_sizes
from attnlib.ops.triton.launch.sequence import (
    K_SCALE,
    KEY_CACHE,
    LSE,
    OUT,
    QUERY,
    SINKS,
    SLOPES,
    V_SCALE,
    VALUE_CACHE,
    Launches,
    batch_sources,
    bind_step,
    score_sources,
)

__all__ = ["PlainAttention"]

_NUM_BATCH_VALUES = 6
"""Values of a batch that the plain kernels take, besides those of its score function."""


class PlainAttention:
    """The launches of one call signature of a plain attention kernel, without addresses.

    Args:
        call: a call of this signature, of which no tensor is kept.
        attend: the attention kernel.
        last: its numbers after the block table and, with partial results, their address.
        partials: the partial results; None for a kernel that takes none.
    """

    needs_alignment = False

    def __init__(
        self,
        call: AttentionCall,
        attend: BoundLaunch,
        last: tuple[float | int | None, ...],
        partials: Partials | None = None,
    ) -> None:
        params, shape = call.params, call.shape
        self.limits = call.limits
        self.index = call.query.get_device()
        self.attend = attend
        self.as_bytes = params.scales_in_page or reads_bytes(shape.cache_dtype, call.limits)
        self._numbers = attention_numbers(call)
        self._table_stride = call.table_stride
        self._last = last
        self._takes_partials = partials is not None
        self._score_sizes = tensor_sizes(params.layer_score_tensors())
        self._num_batch_tensors = len(call.batch.score_tensors)
        self.num_batch_values = _NUM_BATCH_VALUES + 3 * self._num_batch_tensors
        num_splits, self.combine, self.workspace_bytes = partials or Partials(1, None, 0)
        sizes = (num_splits, call.num_tokens, shape.num_heads)
        self._combine_tail = (*sizes, *call.out.stride()[:2], call.lse_stride)

    @property
    def kernels(self) -> tuple[BoundLaunch, ...]:
        """The kernels that `run` launches."""
        return (self.attend,) if self.combine is None else (self.attend, self.combine)

    def launches(self, direct: bool, aligned: bool = True) -> Launches:
        """The launches of both kernels. The order of their arguments is written here.

        Args:
            direct: launch without Triton, on addresses.
            aligned: for launches by Triton, whether all tensors are aligned.
        """
        starts, lens, flags, bias, table, space = batch_sources(_NUM_BATCH_VALUES)
        pointers, sizes = score_arguments(
            self._score_sizes, self._num_batch_tensors, _NUM_BATCH_VALUES
        )
        layer_tensors = score_sources(len(self._score_sizes) // 2)
        caches, scales = (KEY_CACHE, VALUE_CACHE), (K_SCALE, V_SCALE)
        of_batch = (starts, lens, flags, SLOPES, SINKS, bias)
        partials = (space,) if self._takes_partials else ()
        arguments = (
            *(QUERY, *caches, OUT, LSE),
            *of_batch,
            *(*scales, *layer_tensors, *pointers),
            *(*self._numbers, table, self._table_stride),
            *(*partials, *self._last, *sizes),
        )
        steps = [bind_step(self.attend, direct, aligned, arguments)]
        if self.combine is not None:
            arguments = (space, SINKS, OUT, LSE, *self._combine_tail)
            steps.append(bind_step(self.combine, direct, aligned, arguments))
        return Launches(tuple(steps))

    @cached_property
    def direct(self) -> Launches:
        """The direct launches, made once."""
        return self.launches(True)

    def with_scratch(self, batch: BatchTensors) -> BatchTensors:
        """The batch, with memory for partial results where it has none or too little."""
        need, space = self.workspace_bytes, batch.workspace
        if need == 0 or (space is not None and space.nbytes >= need):
            return batch
        device = batch.query_start_loc.device
        return batch._replace(workspace=torch.empty(need // 4, dtype=torch.float32, device=device))

    def addresses(self, batch: BatchTensors) -> tuple[Any, ...] | None:
        """The values of a batch for direct launches; None if its workspace is not aligned."""
        starts, lens, table, flags, bias, space = batch[:6]
        partials = None
        if self.combine is not None:
            assert space is not None  # `workspace_bytes` is not 0
            partials = space.data_ptr()
            if partials & ALIGNMENT:
                return None
        score = batch.score_tensors
        return (
            starts.data_ptr(),
            lens.data_ptr(),
            None if flags is None else flags.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if table is None else table.data_ptr(),
            partials,
            *(batch_score_values(score, True) if score else ()),
        )

    def tensors(self, batch: BatchTensors) -> tuple[Any, ...]:
        """The values of a batch for launches by Triton."""
        partials, flags = batch.workspace if self.combine is not None else None, batch.causal_flags
        if partials is not None and partials.dtype != torch.float32:
            partials = partials.view(torch.float32)
        if flags is not None and flags.dtype != torch.uint8:
            flags = flags.view(torch.uint8)
        return (
            *(batch.query_start_loc, batch.seq_lens, flags),
            *(batch.query_bias, batch.block_table, partials),
            *batch_score_values(batch.score_tensors, False),
        )
