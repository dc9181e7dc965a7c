"""Moving and clearing whole blocks of caches, within a device and across devices: ids are checked before anything is written.

Works on views `[blocks, ...]` alone, so that caches in any layout, and in two different ones, are served alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnlib.errors import ContractError

__all__ = ["BlockPairs", "check_ids", "checked_pairs", "move_blocks", "zero_blocks"]

BlockPairs = Sequence[tuple[int, int]] | torch.Tensor
"""(source, destination) block ids, or an integer tensor `[n, 2]`."""


def checked_pairs(
    pairs: BlockPairs, num_source: int, num_destination: int
) -> tuple[list[int], list[int]]:
    """Sources and destinations of a move.

    Args:
        pairs: what is moved where.
        num_source: blocks of the pool that is read.
        num_destination: blocks of the pool that is written.

    Raises:
        ContractError: an id out of range, or a destination named twice.
    """
    rows = pairs.tolist() if isinstance(pairs, torch.Tensor) else [tuple(pair) for pair in pairs]
    source, destination = [int(row[0]) for row in rows], [int(row[1]) for row in rows]
    check_ids("source block", source, num_source)
    check_ids("destination block", destination, num_destination)
    doubles = (
        sorted({block for block in destination if destination.count(block) > 1})
        if len(set(destination)) < len(destination)
        else []
    )
    if doubles:
        raise ContractError(
            f"destination block {doubles[0]} is named more than once: which copy should win is not defined"
        )
    return source, destination


def check_ids(what: str, ids: Sequence[int], num_blocks: int) -> None:
    """Refuse ids that are not in the pool.

    Raises:
        ContractError: names the first such id and its place in `ids`.
    """
    for position, block in enumerate(ids):
        if not 0 <= block < num_blocks:
            raise ContractError(
                f"{what} {block} (entry {position}) is outside the pool of {num_blocks} blocks (0 to {num_blocks - 1})",
                rule="P3",
            )


def move_blocks(
    source: Sequence[torch.Tensor],
    target: Sequence[torch.Tensor],
    source_ids: list[int],
    target_ids: list[int],
) -> None:
    """Copy blocks of the source's views into the target's, which may be the same ones, elsewhere, or strided otherwise.

    All blocks are read before one is written.
    """
    if not source_ids:
        return
    take = torch.tensor(source_ids, device=source[0].device)
    put = torch.tensor(target_ids, device=target[0].device)
    taken = [_bytes(view).index_select(0, take) for view in source]
    for view, blocks in zip(target, taken, strict=True):
        _bytes(view).index_copy_(0, put, blocks.to(put.device))


def zero_blocks(views: Sequence[torch.Tensor], ids: list[int]) -> None:
    """Fill blocks of the views with zeros."""
    if not ids:
        return
    index = torch.tensor(ids, device=views[0].device)
    for view in views:
        _bytes(view).index_fill_(0, index, 0)


def _bytes(view: torch.Tensor) -> torch.Tensor:
    """8-bit floats seen as bytes: torch moves them, but cannot index them on every device."""
    return view.view(torch.uint8) if view.dtype.itemsize == 1 else view
