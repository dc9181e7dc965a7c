"""Keys or values of a group of requests, gathered from the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.torch.gather import BlockBuffer, Scratch
from attnlib.ops.torch.paged import PagedInputs

__all__ = ["GroupBuffer"]

# Bytes of K that one thread gathers at a time, and as many of V: sized for a level-2 cache.
_GATHER_BYTES = 1 << 19


class GroupBuffer:
    """A block buffer, viewed per request."""

    def __init__(
        self, caches: list[Tensor], num_blocks: int, num_requests: int, scratch: Scratch
    ) -> None:
        self._blocks = BlockBuffer(caches, num_blocks, scratch)
        key, value = (
            rows.view(num_requests, -1, *rows.shape[1:]).transpose(1, 2)
            for rows in self._blocks.rows
        )
        self._sides = key, value

    def load(self, blocks: Tensor, hidden: list[tuple[int, slice]]) -> tuple[Tensor, Tensor]:
        """Keys and values `[G, H, S, D]`, 0 where hidden; valid until the next load."""
        self._blocks.load(blocks)
        for member, keys in hidden:
            for side in self._sides:
                side[member, :, keys].zero_()
        return self._sides


def _gather_bytes() -> int:
    return _GATHER_BYTES * torch.get_num_threads()


def _block_bytes(inputs: PagedInputs) -> int:
    """Bytes of one block of K or V, whichever is larger."""
    return max(
        cache[:1].numel() * cache.element_size() for cache in (inputs.key_cache, inputs.value_cache)
    )
