"""Launches of the kernels of state layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnlib.ops.states.batch import StateBatch
from attnlib.ops.triton.heuristics.device import device_guard
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES

__all__ = ["batch_tensors", "run_kernel"]


def batch_tensors(batch: StateBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors of `kernels.state_arguments.StateBatch`."""
    sources = batch.slots if batch.sources is None else batch.sources
    return batch.query_start_loc, batch.seq_lens, batch.slots, sources


def run_kernel(
    kernel: Any,
    config: Any,
    grid: tuple[int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    **options: int,
) -> None:
    """Launch a kernel on the current stream of the tensors' device.

    Args:
        kernel: takes tensors, numbers and CONFIG.
        config: the constants.
        grid: programs along two dimensions.
        tensors: on one device.
        numbers: scalars that select no compilation.
        options: of the launch, `num_warps` and `num_stages`; they follow from the constants.
    """
    index = tensors[0].get_device()
    name = ("state", kernel, index, grid, config, *(tensor.dtype for tensor in tensors))
    launch: BoundLaunch | None = LAUNCHES.get(name)
    if launch is None:
        # A fused product and sum would depend on the kernel around them (T18).
        constants = {"CONFIG": config, "enable_fp_fusion": False, "num_warps": 4, **options}
        launch = LAUNCHES.keep(name, BoundLaunch(kernel, (*grid, 1), constants))
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    with device_guard(tensors[0]):
        launch.run((*tensors, *numbers), addresses, index)
