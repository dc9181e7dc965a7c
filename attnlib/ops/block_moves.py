"""Copy and zero whole cache blocks, on one device or between devices.

The functions work on views `[blocks, ...]` with any strides, so the caches may have any layout, or
two different ones. All ids are checked before anything is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from attnlib.errors import ContractError
from attnlib.ops.addresses import as_id, as_ids
from attnlib.ops.checks import check_writable

__all__ = [
    "BlockPairs",
    "KeysAndValues",
    "as_bytes",
    "check_ids",
    "checked_move",
    "checked_pairs",
    "move_blocks",
    "swap_tensor_blocks",
    "zero_blocks",
]

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)

BlockPairs = Sequence[tuple[int, int]] | torch.Tensor
"""(source, destination) block ids, or an integer tensor `[n, 2]`."""

KeysAndValues = torch.Tensor | Sequence[torch.Tensor]
"""Keys and values of blocks: a tensor `[2, B, ...]`, or two tensors `[B, ...]`."""


def checked_pairs(
    pairs: BlockPairs, num_source: int, num_destination: int
) -> tuple[list[int], list[int]]:
    """The sources and the destinations of a copy, checked.

    Args:
        pairs: (source, destination) block ids.
        num_source: blocks in the pool that is read.
        num_destination: blocks in the pool that is written.

    Returns:
        (source ids, destination ids).

    Raises:
        ContractError: ids that are not integers, an id that is out of range, or a destination that
            occurs twice.
    """
    if isinstance(pairs, torch.Tensor):
        if pairs.dtype not in _INTEGERS or (
            pairs.numel() and (pairs.dim() != 2 or pairs.shape[1] != 2)
        ):
            raise ContractError(
                f"block pairs are {pairs.dtype} {tuple(pairs.shape)}; pass integers of shape "
                "[n, 2], source and destination per row",
                rule="P3",
            )
        rows = pairs.tolist()
    else:
        given = as_ids("block pairs", pairs)
        rows = [_pair(position, pair) for position, pair in enumerate(given)]
    source, destination = [row[0] for row in rows], [row[1] for row in rows]
    check_ids("source block", source, num_source)
    check_ids("destination block", destination, num_destination)
    repeated = [block for block, count in Counter(destination).items() if count > 1]
    if repeated:
        raise ContractError(
            f"destination block {min(repeated)} occurs more than once: the result would depend on "
            f"the order of the copies"
        )
    return source, destination


def _pair(position: int, pair: Sequence[int]) -> tuple[int, int]:
    try:
        source, destination = pair
    except (TypeError, ValueError):
        raise ContractError(
            f"block pair {pair!r} (index {position}) must be two ids, source and destination",
            rule="P3",
        ) from None
    first = as_id("source block", source, position)
    return first, as_id("destination block", destination, position)


def check_ids(what: str, ids: Sequence[int], num_blocks: int) -> None:
    """Check that all block ids are inside the pool.

    Args:
        what: how the error message calls the ids.
        ids: block ids.
        num_blocks: blocks in the pool.

    Raises:
        ContractError: names the first invalid id and its position in `ids`.
    """
    for position, block in enumerate(ids):
        block = as_id(what, block, position)
        if not 0 <= block < num_blocks:
            raise ContractError(
                f"{what} {block} (index {position}) is outside the pool of {num_blocks} blocks "
                f"(0 to {num_blocks - 1})",
                rule="P3",
            )


def move_blocks(
    source: Sequence[torch.Tensor],
    target: Sequence[torch.Tensor],
    source_ids: list[int],
    target_ids: list[int],
) -> None:
    """Copy blocks of the source views into the target views.

    The two may be the same views, live on different devices, or have different strides. Every
    source block is read before any target block is written.
    """
    if not source_ids:
        return
    for view in target:
        check_writable(blocks=view)
    take = torch.tensor(source_ids, device=source[0].device)
    put = torch.tensor(target_ids, device=target[0].device)
    taken = [as_bytes(view).index_select(0, take) for view in source]
    for view, blocks in zip(target, taken, strict=True):
        as_bytes(view).index_copy_(0, put, blocks.to(put.device))


def swap_tensor_blocks(source: KeysAndValues, target: KeysAndValues, pairs: BlockPairs) -> None:
    """Copy whole blocks from one cache to another one or within it.

    All sources are read before the first target is written.

    Args:
        source: keys and values of B blocks, a tensor `[2, B, ...]` or two tensors `[B, ...]`.
        target: keys and values of B' blocks of the same shape and dtype, on any device.
        pairs: `[n, 2]`, (source block, target block), read on the host.

    Raises:
        ContractError: ids that are not integers or outside a cache, a target that occurs twice, or
            caches that differ in the shape of a block or in dtype; nothing is written.
    """
    move_blocks(*checked_move(source, target, pairs))


def checked_move(
    source: KeysAndValues, target: KeysAndValues, pairs: BlockPairs
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], list[int], list[int]]:
    """The arguments of `move_blocks`, checked; see `swap_tensor_blocks`."""
    sources, targets = _keys_and_values(source), _keys_and_values(target)
    for one, other in zip(sources, targets, strict=True):
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            raise ContractError(
                f"swap_blocks needs blocks of one kind: the source has {tuple(one.shape[1:])} "
                f"{one.dtype} and the target {tuple(other.shape[1:])} {other.dtype} per block"
            )
    num_source, num_target = (min(len(x) for x in views) for views in (sources, targets))
    return sources, targets, *checked_pairs(pairs, num_source, num_target)


def _keys_and_values(cache: KeysAndValues) -> tuple[torch.Tensor, ...]:
    """The tensors `[B, ...]` of keys and of values."""
    views = tuple(cache)
    if len(views) != 2 or not all(isinstance(x, torch.Tensor) and x.dim() for x in views):
        shape = tuple(cache.shape) if isinstance(cache, torch.Tensor) else type(cache).__name__
        raise ContractError(
            f"a cache is {shape}; pass a tensor [2, blocks, ...] or the pair of keys and values "
            "[blocks, ...]"
        )
    return views


def zero_blocks(views: Sequence[torch.Tensor], ids: list[int]) -> None:
    """Fill blocks of the views with zeros."""
    if not ids:
        return
    for view in views:
        check_writable(blocks=view)
    index = torch.tensor(ids, device=views[0].device)
    for view in views:
        as_bytes(view).index_fill_(0, index, 0)


def as_bytes(view: torch.Tensor) -> torch.Tensor:
    """8-bit floats viewed as uint8: torch cannot index them on every device."""
    return view.view(torch.uint8) if view.dtype.itemsize == 1 else view
