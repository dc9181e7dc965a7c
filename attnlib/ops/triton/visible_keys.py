"""The batch of single queries whose visible keys a mask shows, made on the device in one launch."""

from __future__ import annotations

from torch import Tensor

from attnlib.ops.checks import check_visible_keys
from attnlib.ops.triton.heuristics.device import device_guard, limits_of
from attnlib.ops.triton.kernels.visible_keys import visible_keys_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES

__all__ = ["list_visible_keys"]

_BLOCK = 1024


def list_visible_keys(
    visible: Tensor, row_distance: int, *, table: Tensor, lengths: Tensor, starts: Tensor
) -> None:
    """See `attnlib.ops.torch.visible_keys.list_visible_keys`."""
    check_visible_keys(visible, table, lengths, starts)
    limits_of(visible)
    rows, keys = visible.shape
    if rows == 0:
        return
    key = ("visible keys", visible.get_device(), rows)
    launch = LAUNCHES.get(key) or LAUNCHES.keep(key, _launch(rows))
    numbers = (keys, table.shape[1], row_distance, visible.stride(0), table.stride(0))
    with device_guard(visible):
        launch.run(
            (visible, table, lengths, starts, *numbers), table.data_ptr(), table.get_device()
        )


def _launch(rows: int) -> BoundLaunch:
    constants = {"BLOCK": _BLOCK, "num_warps": 4, "enable_fp_fusion": True}
    return BoundLaunch(visible_keys_kernel, (rows, 1, 1), constants)
