"""Cases of groups whose ranks differ, leave or are late (X8)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from attnlib.errors import ContractError, RankLostError
from attnlib.parallel import RankGroup, divided_batch
from tests.parallel.cases import LIMIT
from tests.parallel.problem import STEPS, Problem, Run, error_of


def refused(text: str, process_group: Any, cpu_group: Any = None) -> str:
    """What is wrong with the refusal of a group on this process."""
    try:
        RankGroup(process_group, cpu_group)
    except ContractError as error:
        return "" if text in str(error) else str(error)
    return f"not refused: {text}"


def parts_of_a_group(group: RankGroup) -> str:
    """Two groups of different sizes beside each other: ranks are those of the group."""
    world = group.world_size
    parts = [list(range(world))[1:], [0]]
    groups = [dist.new_group(part) for part in parts]
    mine, other = (groups[index] for index in (int(group.rank == 0), int(group.rank != 0)))
    if text := refused(f"does not have rank {group.rank}", other):
        return text
    if text := refused(f"has the ranks {parts[group.rank == 0]}", None, mine):
        return text
    own = RankGroup(mine)
    run = Run(Problem({"has_sink": True, "sliding_window": 5}), own)
    errors = [error_of(*run.step(STEPS[name])) for name in STEPS]
    return "" if max(errors) <= LIMIT else f"errors {errors}"


def other_messages(group: RankGroup) -> str:
    """An engine may send messages of its own over the group while ranks agree."""
    run, sent = Run(Problem(), group), torch.full((433,), group.rank, dtype=torch.uint8)
    after, before = ((group.rank + step) % group.world_size for step in (1, -1))
    received = torch.zeros_like(sent)
    requests = [dist.irecv(received, before), dist.isend(sent, after)]
    error = run.largest_error()
    for request in requests:
        request.wait()
    return "" if error <= LIMIT and bool((received == before).all()) else f"error {error:g}"


def a_late_rank(group: RankGroup) -> str:
    """It is named by all others, in the step that it does not begin."""
    own = RankGroup(dist.new_group(timeout=timedelta(seconds=2)))
    run, late = Run(Problem(), own), own.world_size - 1
    run.step(STEPS["prefill"])
    if own.rank == late:
        return ""
    return named(run, late)


def a_rank_that_leaves(group: RankGroup) -> str:
    """The last case: the group cannot be used again."""
    run, last = Run(Problem(), group), group.world_size - 1
    run.step(STEPS["prefill"])
    if group.rank == last:
        dist.destroy_process_group()
        return ""
    return named(run, last)


def named(run: Run, lost: int) -> str:
    """What is wrong with the error of a step without one rank."""
    try:
        run.builders[1].build(divided_batch([1], [23], run.tables[1][2:3], "cpu"))
    except RankLostError as error:
        wanted = f"rank {lost} does not answer rank {run.group.rank} of {run.group.world_size}: "
        return "" if wanted in str(error) else str(error)
    return "a step without one rank"


CASES: dict[str, Callable[[RankGroup], str]] = {
    "parts of a group": parts_of_a_group,
    "other messages": other_messages,
    "a late rank": a_late_rank,
    "a rank that leaves": a_rank_that_leaves,
}
