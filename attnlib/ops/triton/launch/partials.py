"""How a kernel divides keys over programs: workspace, and the kernel that combines the results."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.ops.triton.heuristics.splits import paged_decode_workspace_bytes
from attnlib.ops.triton.heuristics.tiles import next_power_of_2
from attnlib.ops.triton.kernels.decode import combine_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch

__all__ = ["Partials"]

_STEP = 16
"""Splits that the combine kernel of a decode loads at a time."""


class Partials(NamedTuple):
    """How a kernel divides the keys of a request over programs, and what combines their results.

    Attributes:
        num_splits: programs that may share the keys of one request.
        combine: the kernel that combines them; None where nothing is split.
        workspace_bytes: bytes of partial results; 0 where nothing is split.
    """

    num_splits: int
    combine: BoundLaunch | None
    workspace_bytes: int

    @classmethod
    def of_splits(
        cls,
        num_splits: int,
        num_tokens: int,
        num_heads: int,
        head_size_v: int,
        *,
        has_sink: int = False,
        has_lse: bool = False,
        overlap: dict[str, bool] | None = None,
        step: int = _STEP,
        num_warps: int = 4,
    ) -> Partials:
        """The results of splits with normalized sums and an LSE each, combined by `combine_kernel`.

        Args:
            num_splits: programs that may share the keys of one request.
            num_tokens, num_heads, head_size_v: sizes of the output.
            has_sink: `AttentionParams.sink_kind`: whether the combine kernel adds sinks, and which.
            has_lse: whether it writes LSEs.
            overlap: constants of programmatic launches (`programmatic_launch`); None for none.
            step: splits that the combine kernel loads at a time, a power of 2.
            num_warps: of the combine kernel.
        """
        if num_splits <= 1:
            return cls(num_splits, None, 0)
        constants = {
            "HAS_SINK": has_sink,
            "HAS_LSE": has_lse,
            "DV": head_size_v,
            "DV_PAD": next_power_of_2(head_size_v),
            "STEP": step,
            "num_warps": num_warps,
            "enable_fp_fusion": True,
            **(overlap or {"PDL": False}),
        }
        space = paged_decode_workspace_bytes(num_tokens, num_heads, head_size_v, num_splits)
        combine = BoundLaunch(combine_kernel, (num_tokens, num_heads, 1), constants)
        return cls(num_splits, combine, space)

    def allocate(self, like: Tensor) -> Tensor | None:
        """The workspace on the device of a tensor; None where nothing is split."""
        if not self.workspace_bytes:
            return None
        return torch.empty(self.workspace_bytes // 4, dtype=torch.float32, device=like.device)

    def run(
        self, space: Tensor | None, sinks: Tensor | None, out: Tensor, lse: Tensor | None
    ) -> None:
        """Combine the partial results on the current stream; nothing where nothing is split."""
        if self.combine is None or space is None:
            return
        stride_lt = 0 if lse is None else lse.stride(0)
        numbers = (self.num_splits, *out.shape[:2], *out.stride()[:2], stride_lt)
        addresses = space.data_ptr() | out.data_ptr()
        self.combine.run((space, sinks, out, lse, *numbers), addresses, out.get_device())
