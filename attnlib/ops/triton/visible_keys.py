"""The batch of single queries whose visible keys a mask shows, made on the device in one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from attnlib.ops.checks import check_visible_keys
from attnlib.ops.triton.heuristics import device as chips
from attnlib.ops.triton.kernels.visible_keys import visible_keys_kernel
from attnlib.ops.triton.launch.bound import (
    CHANGES,
    BoundLaunch,
    current_stream,
    launches_observed,
)
from attnlib.ops.triton.launch.cache import LAUNCHES

__all__ = ["KeyLister", "list_visible_keys"]

_BLOCK, _WARPS = 2048, 8


def list_visible_keys(
    visible: Tensor, row_distance: int, *, table: Tensor, lengths: Tensor, starts: Tensor
) -> None:
    """See `attnlib.ops.torch.visible_keys.list_visible_keys`."""
    KeyLister(row_distance, table=table, lengths=lengths, starts=starts).run(visible)


class KeyLister:
    """See `attnlib.ops.torch.visible_keys.KeyLister`."""

    def __init__(
        self, row_distance: int, *, table: Tensor, lengths: Tensor, starts: Tensor
    ) -> None:
        self._tensors = table, lengths, starts
        self._numbers = table.shape[1], row_distance
        self._rows, self._index = lengths.shape[0], table.get_device()
        self._submit: Callable[..., None] | None = None
        self._stream: Callable[[int], int] = current_stream

    def run(self, visible: Tensor) -> None:
        """See `attnlib.ops.torch.visible_keys.KeyLister`."""
        submit, index = self._submit, self._index
        if submit is not None and self._takes(visible) and not launches_observed():
            if chips.current_device() == index:
                address, (stride, _) = visible.data_ptr(), visible.stride()
                submit(self._stream(index), address, visible.shape[1], stride)
                return
        self._run(visible)

    def _takes(self, visible: Tensor) -> bool:
        """Whether the bound launch takes this mask; others are checked."""
        is_dense = visible.dim() == 2 and visible.stride(1) == 1 and visible.dtype is torch.bool
        return is_dense and visible.shape[0] == self._rows and visible.get_device() == self._index

    def _run(self, visible: Tensor) -> None:
        """The same with checks, and through Triton before a launch is bound."""
        table, lengths, starts = self._tensors
        check_visible_keys(visible, table, lengths, starts)
        chips.limits_of(visible)
        rows, keys = visible.shape
        if rows == 0:
            return
        key = ("visible keys", visible.get_device(), rows)
        launch = LAUNCHES.get(key) or LAUNCHES.keep(key, _launch(rows))
        stride, stride_t = visible.stride(0), table.stride(0)
        with chips.device_guard(visible):
            given = (visible, *self._tensors, keys, *self._numbers, stride, stride_t)
            launch.run(given, table.data_ptr(), visible.get_device())
        if launch.is_direct:
            outputs = (each.data_ptr() for each in self._tensors)
            changing = (CHANGES, *outputs, CHANGES, *self._numbers, CHANGES, stride_t)
            self._submit = launch.bind(True, True, changing)
            self._stream = triton.runtime.driver.active.get_current_stream


def _launch(rows: int) -> BoundLaunch:
    constants = {"BLOCK": _BLOCK, "num_warps": _WARPS, "enable_fp_fusion": True}
    return BoundLaunch(visible_keys_kernel, (rows, 1, 1), constants)
