"""Tiles that `attnlib tune` measured on a chip, handed to the kernels: those know no environment and no files."""

from __future__ import annotations

import torch

from attnlib.device import device_info
from attnlib.ops.triton.heuristics.device import set_tuned_tiles
from attnlib.tuning import tuning_for

__all__ = ["use_tuned_tiles"]


def use_tuned_tiles(device: torch.device) -> None:
    """Let kernels on `device` choose tiles from the chip's tuning table first, where there is one."""
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    tuning = tuning_for(device_info("cuda", index))
    set_tuned_tiles(index, tuning.tiles if tuning else None)
