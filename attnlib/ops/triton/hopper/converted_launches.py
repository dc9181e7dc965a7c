"""The launches of a Hopper prefill over copies of keys and values: conversion and prefill."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlib.kv_rotation import KVRotation
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.hopper.descriptors import (
    encode_views,
    encoded_descriptors,
)
from attnlib.ops.triton.hopper.prefill_launches import HopperPrefill
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.sequence import (
    KEY_CACHE,
    VALUE_CACHE,
    Launches,
    Source,
    batch_sources,
    bind_step,
)

__all__ = ["ConvertedPrefill"]


@dataclass(frozen=True, eq=False)
class ConvertedPrefill:
    """The launches of one call signature, without addresses.

    Attributes:
        prefill: the prefill over the copies.
        convert: the conversion.
        scales: which scales the conversion takes from a call: those in the pages, or none.
        numbers: the runtime numbers of the conversion.
        rows: rows of the copies.
        dtype: of the copies.
        sizes: elements of the copies of the keys and of the values.
        rotated: of the heads of the pages, where the copies hold plain ones (P15); else None.
    """

    prefill: HopperPrefill
    convert: BoundLaunch
    scales: tuple[Source | None, Source | None]
    numbers: tuple[int | None, ...]
    rows: int
    dtype: torch.dtype
    sizes: tuple[int, int]
    rotated: KVRotation | None = None

    needs_alignment: ClassVar[bool] = True
    as_bytes: ClassVar[bool] = False
    workspace_bytes: ClassVar[int] = 0

    @property
    def limits(self) -> DeviceLimits:
        """The chip that tile and grid were chosen for."""
        return self.prefill.limits

    @property
    def index(self) -> int:
        """The device index."""
        return self.prefill.index

    @property
    def kernels(self) -> tuple[BoundLaunch, ...]:
        """The kernels that `run` launches."""
        return (self.convert, *self.prefill.kernels)

    @property
    def num_batch_values(self) -> int:
        """The number of values of a batch: those of the prefill, then those of the conversion."""
        return self.prefill.num_batch_values + 7

    def launches(self, direct: bool, aligned: bool = True) -> Launches:
        """The launches. The order of the arguments of the conversion is written here."""
        keys, values, starts, lens, table, *maps = batch_sources(7, self.prefill.num_batch_values)
        found = self.prefill.launches(direct, aligned, maps=(maps[0], maps[1]))
        arguments = (
            KEY_CACHE,
            VALUE_CACHE,
            *self.scales,
            keys,
            values,
            starts,
            lens,
            table,
            *self.numbers,
        )
        return found._replace(
            steps=(bind_step(self.convert, direct, aligned, arguments), *found.steps)
        )

    @cached_property
    def direct(self) -> Launches:
        """The direct launches, made once."""
        return self.launches(True)

    def with_scratch(self, batch: BatchTensors) -> BatchTensors:
        """The batch with memory for the copies, and with counters if it has none."""
        starts = batch.query_start_loc.shape[0]
        space = torch.empty(
            sum(self.sizes) + 4 // self.dtype.itemsize * starts,
            dtype=self.dtype,
            device=batch.query_start_loc.device,
        )
        return self.prefill.with_scratch(batch._replace(workspace=space))

    def addresses(self, batch: BatchTensors) -> tuple[Any, ...] | None:
        """The values of a batch for direct launches; None if its counters are not aligned. Before
        the first launch by Triton they lack the descriptors."""
        packed, (keys, values, starts) = self._packed(batch)
        found = self.prefill.addresses(packed)
        if found is None:
            return None
        assert batch.block_table is not None
        attend, views = self.prefill.attend, self.prefill.views
        copies = keys.data_ptr(), values.data_ptr()
        maps: tuple[Any, ...] = (None, None)
        if attend.encode is not None:  # known once the kernel has been launched by Triton
            encoded = encoded_descriptors(views, attend)
            maps = encoded.get(copies) or encode_views(encoded, attend, views, copies)
        return (
            *found,
            *copies,
            starts.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.block_table.data_ptr(),
            *maps,
        )

    def tensors(self, batch: BatchTensors) -> tuple[Any, ...]:
        """The values of a batch for launches by Triton."""
        packed, (keys, values, starts) = self._packed(batch)
        maps = (
            view.describe(copy.data_ptr())
            for view, copy in zip(self.prefill.views, (keys, values), strict=True)
        )
        return (
            *self.prefill.tensors(packed),
            keys,
            values,
            starts,
            batch.seq_lens,
            batch.block_table,
            *maps,
        )

    def _packed(self, batch: BatchTensors) -> tuple[BatchTensors, tuple[Tensor, Tensor, Tensor]]:
        """The batch of the prefill over the copies; the copies and the first rows of the requests.

        The latter take the place of a block table.
        """
        space = batch.workspace
        assert space is not None  # see `with_scratch`
        num_keys, end = self.sizes[0], sum(self.sizes)
        keys, values, starts = space[:num_keys], space[num_keys:end], space[end:].view(torch.int32)
        packed = batch._replace(seq_lens=starts, block_table=starts.unsqueeze(1))
        return packed, (keys, values, starts)
