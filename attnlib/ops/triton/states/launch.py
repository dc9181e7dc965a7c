"""Launches of the kernels of state layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnlib.ops.states.batch import StateBatch
from attnlib.ops.triton.heuristics.device import device_guard
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES

__all__ = ["KernelLaunch", "batch_tensors"]


def batch_tensors(batch: StateBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors of `kernels.state_arguments.StateBatch`."""
    sources = batch.slots if batch.sources is None else batch.sources
    return batch.query_start_loc, batch.seq_lens, batch.slots, sources


class KernelLaunch:
    """The launches of one kernel for calls that differ in addresses and numbers only.

    Args:
        kernel: takes tensors, numbers and CONFIG.
        config: the constants.
        grid: programs along two dimensions.
        options: of the launch, `num_warps` and `num_stages`; they follow from the constants.
    """

    def __init__(self, kernel: Any, config: Any, grid: tuple[int, int], **options: int) -> None:
        self._kernel, self._config, self._grid, self._options = kernel, config, grid, options
        self._launch: BoundLaunch | None = None

    def run(self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]) -> None:
        """Launch on the current stream of the tensors' device. The numbers select no
        compilation."""
        launch = self._launch
        if launch is None:
            launch = self._launch = self._find(tensors)
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        with device_guard(tensors[0]):
            launch.run((*tensors, *numbers), addresses, tensors[0].get_device())

    def _find(self, tensors: tuple[Tensor, ...]) -> BoundLaunch:
        dtypes, index = (tensor.dtype for tensor in tensors), tensors[0].get_device()
        name = ("state", self._kernel, index, self._grid, self._config, *dtypes)
        found: BoundLaunch | None = LAUNCHES.get(name)
        if found is None:
            # A fused product and sum would depend on the kernel around them (T18).
            constants = {
                "CONFIG": self._config,
                "enable_fp_fusion": False,
                "num_warps": 4,
                **self._options,
            }
            found = BoundLaunch(self._kernel, (*self._grid, 1), constants)
            LAUNCHES.keep(name, found)
        return found
