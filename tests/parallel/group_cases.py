"""Cases of groups whose ranks differ, leave or are late (X8)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import attnlib
from attnlib.errors import ContractError, RankLostError
from attnlib.parallel import (
    Interleaved,
    ParallelAttention,
    ParallelPrefill,
    RankGroup,
    divided_batch,
)
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
    for wrong in ("x", 1.5, [1], torch.zeros(2)):
        for given in ((wrong,), (None, wrong)):
            if text := refused("that torch.distributed does not know", *given):
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


_SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=4
)

_WRONG_LAYERS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"scale": "x"}, "scale='x' must be a finite number"),
    ({"scale": 10**400}, "must be a finite number"),
    ({"scale": float("nan")}, "scale=nan must be a finite number"),
    ({"device": "nowhere"}, "device='nowhere' is not known; use 'cpu'"),
    ({"device": 10**30}, "is not known; use 'cpu'"),
    ({"device": "meta"}, "device=meta:0: process_group exchanges by"),
    ({"spec": None}, "takes an attnlib.AttentionSpec, and spec is a NoneType"),
    ({"division": Interleaved(7, 4)}, "is for 7 ranks, the group has"),
    ({"division": "x"}, "division is a str; pass"),
    ({"sinks": torch.zeros(4)}, "sinks is given, and the spec says otherwise"),
    ({"agreement": None}, "agreement=None must be one of call, batch, never"),
    ({"agreement": "x"}, "agreement='x' must be one of"),
)


def _refused_by_all(group: RankGroup, name: str, wrong: str, call: Callable[[], Any]) -> str:
    """What is wrong with a call that the last rank refuses."""
    try:
        call()
    except ContractError as error:
        wanted = f"rank {group.world_size - 1} refuses: "
        found = str(error)
        return "" if found.startswith(wanted) and wrong in found else f"{name}: {found}"
    return f"{name} is not refused"


def wrong_arguments_of_one_rank(group: RankGroup) -> str:
    """All ranks refuse together, and can continue: no rank waits for one that raised alone."""
    last = group.rank == group.world_size - 1
    division = Interleaved(group.world_size, 4)
    right: dict[str, Any] = {"spec": _SPEC, "division": division, "device": "cpu"}
    found = []
    for kind in (ParallelAttention, ParallelPrefill):
        for change, text in _WRONG_LAYERS:
            given = right | (change if last else {})
            spec, of = given.pop("spec"), given.pop("division")
            make = functools.partial(kind, spec, group, of, **given)
            found.append(_refused_by_all(group, f"{kind.__name__} {change}", text, make))
    layer = ParallelAttention(_SPEC, group, division, device="cpu")
    prefill = ParallelPrefill(_SPEC, group, division, device="cpu")
    builder, of_prompts = layer.make_builder(), prefill.make_builder()
    table = [[0, 1], [2, 3]]
    batch = divided_batch([1, 2], [5, 6], table, "cpu")
    calls: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
        ("batch", lambda x: builder.build(x or batch), "common_attn_metadata is a str"),
        ("write", lambda x: builder.build(batch, write=x or True), "write='x' must be True or"),
        ("context", lambda x: builder.build(batch, has_context=x), "has_context='x' must be True,"),
        ("lengths", lambda x: of_prompts.build(x or [3, 2], table), "prompt_lens[0]"),
        ("number", lambda x: of_prompts.build(5 if x else [3, 2], table), "prompt_lens is a int"),
        ("negative", lambda x: of_prompts.build([3, -1 if x else 2], table), "not be negative"),
        ("table", lambda x: of_prompts.build([3, 2], x or table), "block_table"),
    )
    for name, call, text in calls:
        given_value = "x" if last else None
        found.append(_refused_by_all(group, name, text, functools.partial(call, given_value)))
    tensors = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    cache = attnlib.PagedKVCache.allocate(_SPEC, num_blocks=4, device="cpu")
    changes: tuple[Callable[[torch.Tensor], Any], ...] = (
        torch.Tensor.double,
        lambda x: x.to("meta"),
        torch.Tensor.tolist,
        lambda x: torch.cat((x, x), 2)[..., ::2],
    )
    for of_query in changes:
        query = of_query(tensors[0]) if last else tensors[0]
        step = functools.partial(layer, query, *tensors[1:], cache, builder.build(batch))
        found.append(_refused_by_all(group, "query", "query ", step))
    layer(*tensors, cache, builder.build(batch))
    of_prompts.build([3, 2], table)
    return "; ".join(filter(None, found))


CASES: dict[str, Callable[[RankGroup], str]] = {
    "devices": devices,
    "parts of a group": parts_of_a_group,
    "wrong arguments of one rank": wrong_arguments_of_one_rank,
    "a late rank": a_late_rank,
    "a rank that leaves": a_rank_that_leaves,
}
