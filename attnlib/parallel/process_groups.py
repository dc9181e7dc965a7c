"""The ranks of a process group of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from attnlib.errors import ContractError

__all__ = ["ranks_of"]


def ranks_of(name: str, process_group: Any) -> list[int]:
    """The global ranks of a group that this process is in.

    Args:
        name: of the argument, for messages.
        process_group: the group; None for the default one.

    Raises:
        ContractError: torch.distributed is not initialized or does not know the group, or this
            process is not in it.
    """
    if not dist.is_initialized():
        raise ContractError(
            "torch.distributed is not initialized: call init_process_group before RankGroup",
            rule="X8",
        )
    try:
        rank = dist.get_rank(process_group)
    except (RuntimeError, TypeError, ValueError) as error:
        kind = type(process_group).__name__
        raise ContractError(
            f"{name} is a {kind} that torch.distributed does not know ({error}): pass a group of "
            "new_group that was not destroyed, or None for the default group",
            rule="X8",
        ) from None
    if rank < 0:
        raise ContractError(
            f"{name} does not have rank {dist.get_rank()}, this process: make a RankGroup only on "
            "the ranks of its group",
            rule="X8",
        )
    return dist.get_process_group_ranks(process_group or dist.group.WORLD)
