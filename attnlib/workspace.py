"""Scratch memory for kernels, passed as an argument.

With `BatchLimits` the size is known before the first step and never changes: CUDA graphs may
capture the address, and a batch beyond the limits is an error. Without limits the buffer grows when
a batch is built, never inside `forward`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlib.errors import ContractError
from attnlib.ops.addresses import as_count

__all__ = ["BatchLimits", "Workspace"]


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The largest batch that a runner builds.

    Attributes:
        max_num_reqs: requests in one step.
        max_num_tokens: new tokens in one step.
        max_seq_len: length of the longest sequence.

    Raises:
        ContractError: a limit below 1, no integer, or one that int32 cannot hold.
    """

    max_num_reqs: int
    max_num_tokens: int
    max_seq_len: int

    def __post_init__(self) -> None:
        for name in ("max_num_reqs", "max_num_tokens", "max_seq_len"):
            limit = as_count(name, getattr(self, name), 1)
            if limit >= 1 << 31:
                raise ContractError(f"{name}={limit} does not fit int32 (at most {(1 << 31) - 1})")


class Workspace:
    """A growing or fixed buffer on one device.

    Args:
        device: device of the buffer.
        num_bytes: bytes to allocate now.
        fixed: True if a larger request is an error instead of growing the buffer.
        dtype: of the buffer.
    """

    def __init__(
        self,
        device: torch.device,
        num_bytes: int = 0,
        *,
        fixed: bool = False,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        self.device = device
        self.fixed = fixed
        self.dtype = dtype
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        count = -(-num_bytes // self.dtype.itemsize)
        self._buffer = torch.empty(count, dtype=self.dtype, device=self.device)
        self.num_bytes = num_bytes
        """Size of the buffer in bytes."""

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """The buffer, of at least `num_bytes` bytes; it grows first if it is too small.

        Raises:
            ContractError: the workspace is fixed and too small.
        """
        if num_bytes > self.num_bytes:
            if self.fixed:
                raise ContractError(
                    f"this batch needs {num_bytes} bytes of workspace, {self.num_bytes} were "
                    f"declared: raise the BatchLimits given to the builder"
                )
            self._allocate(num_bytes)
        return self._buffer
