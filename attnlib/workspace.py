"""Scratch memory for kernels: declared in bytes before the first step, allocated once, passed as an argument.

With `BatchLimits` the size is known up front and never changes: CUDA graphs may hold the address, and a batch beyond the limits is an error
that names the bytes. Without limits the buffer grows while a batch is built, never inside `forward`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlib.errors import ContractError

__all__ = ["BatchLimits", "Workspace"]


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The largest batch that a runner will ever build.

    Attributes:
        max_num_reqs: requests in one step.
        max_num_tokens: new tokens in one step.
        max_seq_len: longest sequence.
    """

    max_num_reqs: int
    max_num_tokens: int
    max_seq_len: int

    def __post_init__(self) -> None:
        for name in ("max_num_reqs", "max_num_tokens", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ContractError(f"{name}={getattr(self, name)} must be at least 1")


class Workspace:
    """One buffer of bytes on one device.

    Args:
        device: where.
        num_bytes: bytes to allocate now.
        fixed: True when a larger demand is an error instead of a reason to grow.
    """

    def __init__(self, device: torch.device, num_bytes: int = 0, *, fixed: bool = False) -> None:
        self.device = device
        self.fixed = fixed
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self._buffer.numel()

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """The buffer, `[>= num_bytes]` uint8; grown first if it is too small.

        Raises:
            ContractError: the workspace is fixed and too small; the message names both sizes.
        """
        if num_bytes > self.num_bytes:
            if self.fixed:
                raise ContractError(
                    f"this batch needs {num_bytes} bytes of workspace, {self.num_bytes} were declared: raise the BatchLimits given to the builder"
                )
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer
