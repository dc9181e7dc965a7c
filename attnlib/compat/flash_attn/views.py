"""Contiguous caches and dense keys as paged caches, by views (P1, P3)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnlib.compat.flash_attn.arguments import FlashAttentionArgumentError

__all__ = ["BlockView", "block_views", "token_views"]

_BLOCK_SIZES = (256, 128, 64, 32, 16)
"""Block sizes that the Hopper kernels read, the fewest blocks first."""


class BlockView(NamedTuple):
    """How keys `[B, S, H, D]` are viewed as blocks `[blocks, N, H, D]`.

    Attributes:
        block_size: N.
        blocks_per_sequence: blocks of one sequence, S / N.
        step: first block of a sequence minus first block of the sequence before it.
        keys, values: (shape, strides) of the two views; None where the tensors have that form.
    """

    block_size: int
    blocks_per_sequence: int
    step: int
    keys: tuple[tuple[int, ...], tuple[int, ...]] | None
    values: tuple[tuple[int, ...], tuple[int, ...]] | None

    def of(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two views of tensors with the strides that this was made for."""
        if self.keys is None or self.values is None:
            return keys, values
        return torch.as_strided(keys, *self.keys), torch.as_strided(values, *self.values)

    def table(self, sequences: int, device: torch.device) -> torch.Tensor:
        """The block table `[sequences, blocks_per_sequence]` of the sequences 0, 1, ..."""
        rows = torch.arange(sequences, dtype=torch.int32, device=device) * self.step
        columns = torch.arange(self.blocks_per_sequence, dtype=torch.int32, device=device)
        return rows[:, None] + columns


def block_views(keys: torch.Tensor, values: torch.Tensor) -> BlockView:
    """The view with the largest block size that Hopper kernels read; else one block per sequence,
    which every strided tensor has.

    Args:
        keys: `[B, S, H, D]`, S >= 1.
        values: `[B, S, H, Dv]`.
    """
    for block_size in _BLOCK_SIZES:
        found = _view(keys, values, block_size)
        if found is not None:
            return found
    return BlockView(keys.shape[1], 1, 1, None, None)


def token_views(keys: torch.Tensor, values: torch.Tensor) -> BlockView:
    """The view in blocks of one token, so that a sequence may begin at any token.

    Raises:
        FlashAttentionArgumentError: the strides of the tensors do not allow it.
    """
    found = _view(keys, values, 1)
    if found is None:
        raise FlashAttentionArgumentError(
            f"cache_leftpad needs k_cache and v_cache whose sequence stride is a multiple of their "
            f"token stride, got strides {keys.stride()} and {values.stride()}: pass contiguous "
            "caches"
        )
    return found


def _view(keys: torch.Tensor, values: torch.Tensor, block_size: int) -> BlockView | None:
    length = keys.shape[1]
    if length % block_size:
        return None
    count, steps, forms = length // block_size, [], []
    for tensor in (keys, values):
        batch, _, heads, size = tensor.shape
        sequence, token, head, element = tensor.stride()
        block = block_size * token
        if batch == 1:
            step = count
        elif block and sequence % block == 0:
            step = sequence // block
        else:
            return None
        steps.append(step)
        shape = ((batch - 1) * step + count, block_size, heads, size)
        forms.append((shape, (block, token, head, element)))
    if steps[0] != steps[1]:
        return None
    return BlockView(block_size, count, steps[0], forms[0], forms[1])
