"""Launches of the kernels of state layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnlib.ops.triton.heuristics.device import device_guard
from attnlib.ops.triton.launch import sequence
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES

__all__ = ["KernelLaunch"]


class KernelLaunch:
    """The launches of one kernel for calls that differ in addresses only.

    Args:
        kernel: takes tensors, numbers and CONFIG.
        config: the constants.
        grid: programs along two dimensions.
        numbers: select no compilation; integers may differ between batches.
        options: of the launch, `num_warps` and `num_stages`; they follow from the constants.
    """

    def __init__(
        self,
        kernel: Any,
        config: Any,
        grid: tuple[int, int],
        numbers: tuple[float, ...] = (),
        **options: int,
    ) -> None:
        self._kernel, self._config, self._grid, self._options = kernel, config, grid, options
        self._numbers = numbers
        self._kept: _KeptLaunch | None = None
        self._direct: Callable[..., bool] | None = None

    def run(self, *tensors: Tensor) -> None:
        """Launch on the current stream of the tensors' device."""
        if self._direct is None:
            if self._kept is None:
                self._kept = self._find(tensors)
            self._direct = self._kept.bind(tensors, self._numbers)
        if self._direct is None or not self._direct(*tensors):
            assert self._kept is not None  # found before the first launch
            self._kept.by_triton(tensors, self._numbers)

    def _find(self, tensors: tuple[Tensor, ...]) -> _KeptLaunch:
        # Every step finds its launches: lists are quicker than generators here.
        dtypes, index = [tensor.dtype for tensor in tensors], tensors[0].get_device()
        floats = [number for number in self._numbers if isinstance(number, float)]
        name = ("state", self._kernel, index, self._grid, self._config, *dtypes, *floats)
        found: _KeptLaunch | None = LAUNCHES.get(name)
        if found is None:
            # A fused product and sum would depend on the kernel around them (T18).
            constants = {
                "CONFIG": self._config,
                "enable_fp_fusion": False,
                "num_warps": 4,
                **self._options,
            }
            found = _KeptLaunch(BoundLaunch(self._kernel, (*self._grid, 1), constants), index)
            LAUNCHES.keep(name, found)
        return found


class _KeptLaunch:
    """The launch of a kernel with one grid and fixed dtypes, without addresses and integers."""

    def __init__(self, launch: BoundLaunch, index: int) -> None:
        self._launch, self._index = launch, index
        self._template: Any = None

    def by_triton(self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]) -> None:
        """Launch through Triton, after which direct launches may be possible."""
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        with device_guard(tensors[0]):
            self._launch.by_triton((*tensors, *numbers), not addresses & ALIGNMENT)

    def bind(
        self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]
    ) -> Callable[..., bool] | None:
        """A function of the tensors that launches directly, or returns False where Triton has to;
        None where direct launches are not possible."""
        if not self._launch.is_direct:
            return None
        integers = [number for number in numbers if isinstance(number, int)]
        if self._template is None:
            given = tuple(map(sequence.Source, range(len(tensors))))
            of_batch = iter(sequence.batch_sources(len(integers)))
            rest = (next(of_batch) if isinstance(number, int) else number for number in numbers)
            step = sequence.bind_step(self._launch, True, True, (*given, *rest))
            parts = [sequence.Part(sequence.Launches((step,)))]
            self._template = sequence.prepare_sequence(
                parts, self._index, len(tensors), {}, len(integers), aligned=given
            )
        bound: Callable[..., bool] = self._template.bind(tuple(integers))
        return bound
