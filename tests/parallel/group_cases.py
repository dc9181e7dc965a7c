"""Cases of groups whose ranks differ, leave or are late (X8)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from attnlib.errors import ContractError, RankLostError
from attnlib.parallel import RankGroup, divided_batch
from attnlib.parallel import group as group_of_ranks
from tests.parallel.cases import LIMIT
from tests.parallel.problem import STEPS, Problem, Run, error_of


def refused(text: str, process_group: Any, cpu_group: Any = None) -> str:
    """What is wrong with the refusal of a group on this process."""
    try:
        RankGroup(process_group, cpu_group)
    except ContractError as error:
        return "" if text in str(error) else str(error)
    return f"not refused: {text}"


def devices(group: RankGroup) -> str:
    """Layers on a GPU need NCCL, layers on a CPU gloo."""
    for process_group, device, named in (
        (None, "cuda", "device=cuda: process_group exchanges by cpu:gloo,cuda:gloo"),
        (dist.new_group(backend="cpu:gloo"), "cuda:1", "exchanges by cpu:gloo: make it with"),
    ):
        own = RankGroup(process_group)
        own.check_device(torch.device("cpu"))
        try:
            own.check_device(torch.device(device))
            return f"{device} was not refused"
        except ContractError as error:
            if named not in str(error):
                return str(error)
    return ""


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


def a_late_rank(group: RankGroup) -> str:
    """It is named by all others, in the step that it does not begin."""
    own = RankGroup(dist.new_group(timeout=timedelta(seconds=2)))
    run, late = Run(Problem(), own), own.world_size - 1
    run.step(STEPS["prefill"])
    if own.rank < late:
        return named(run, late)
    time.sleep(7)  # the others wait 2 s, and 2 s for its answer
    try:
        own.agree("facts")
    except RankLostError as error:
        return "" if f"rank {late} of {own.world_size} or one" in str(error) else str(error)
    return "a late rank agreed"


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
        with mock.patch.object(group_of_ranks, "_GRACE", timedelta(seconds=2)):
            run.builders[1].build(divided_batch([1], [23], run.tables[1][2:3], "cpu"))
    except RankLostError as error:
        wanted = f"ranks [{lost}] do not answer rank {run.group.rank} of {run.group.world_size}: "
        return "" if wanted in str(error) else str(error)
    return "a step without one rank"


CASES: dict[str, Callable[[RankGroup], str]] = {
    "devices": devices,
    "parts of a group": parts_of_a_group,
    "a late rank": a_late_rank,
    "a rank that leaves": a_rank_that_leaves,
}
