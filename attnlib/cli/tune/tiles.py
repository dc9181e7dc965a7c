"""Tiles on the chip: each candidate on each case, held against the oracle and then timed, and what a table says of the best.

The kernels are called as they are, without a backend around them, with a table of one entry that makes them choose the candidate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from attnlib.bench.case import BenchCase
from attnlib.bench.correctness import Gate
from attnlib.bench.inputs import Material, make_material
from attnlib.bench.timer import EagerWatch, GraphWatch, take_turns, wind_up
from attnlib.cli.tune.candidates import Group, candidates
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import device_index, limits_of, set_tuned_tiles
from attnlib.ops.triton.heuristics.tile_table import TileTable, parse_table

__all__ = ["Trial", "best_entries", "measure_tiles"]

MARGIN = 0.98
"""A tile has to take less than this share of today's time to replace it: two runs of one kernel differ by about as much."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """One candidate on one case.

    Attributes:
        group: what the case stands for.
        case: its name.
        tile: the candidate's numbers.
        us: microseconds, None when it does not count.
        today: whether it is the tile that is chosen without this table.
        reason: why it does not count.
    """

    group: Group
    case: str
    tile: Mapping[str, Any]
    us: float | None
    today: bool
    reason: str = ""


@torch.inference_mode()
def measure_tiles(
    case: BenchCase,
    op: str,
    group: Group,
    device: torch.device,
    *,
    quick: bool,
    expired: Callable[[], bool],
    report: Report,
) -> list[Trial]:
    """Every candidate on one case, today's first; stops early when `expired`. The user's own table is put back afterwards."""
    material = make_material(case, device)
    gate, index = Gate(material), device_index(material.query)
    before = limits_of(material.query).tuned
    trials: list[Trial] = []
    try:
        for number, tile in enumerate(candidates(case, op, limits_of(material.query), quick)):
            if number and expired():
                break
            trials.append(_try(op, group, tile, material, gate, index, today=number == 0))
            report(_told(trials[-1], trials[0]))
    finally:
        set_tuned_tiles(index, before)
    return trials


def _try(
    op: str,
    group: Group,
    tile: dict[str, Any],
    material: Material,
    gate: Gate,
    index: int,
    *,
    today: bool,
) -> Trial:
    """Compile, judge, time; whatever a candidate raises is its reason."""

    def outcome(us: float | None, reason: str = "") -> Trial:
        return Trial(group, material.case.name, tile, us, today, reason)

    set_tuned_tiles(index, _only(op, tile))
    try:
        material.output.fill_(float("nan"))
        call = _call(op, material)
        expected = wind_up(call, material.device)
        call(0)
        found = gate.judge(material.output)
        if not found.passed:
            return outcome(None, f"wrong: {found}")
        kind = (
            GraphWatch if material.device.type == "cuda" else EagerWatch
        )  # the interpreter, for tests
        watch = kind(call, len(material.caches), material.device, expected)
        return outcome(take_turns({"it": watch}, {"it": expected})["it"].us)
    except (
        Exception
    ) as error:  # too large for the chip, or a compiler's own failure: the next candidate may do
        if material.device.type == "cuda":
            torch.cuda.synchronize(material.device)  # raises when the device itself is lost
        return outcome(
            None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )


def _only(op: str, tile: Mapping[str, Any]) -> TileTable:
    """A table that has this tile for everything."""
    line = {"op": op, "tile": dict(tile), "provenance": "trial"}
    return parse_table(
        {"schema": 1, "chip": "trial", "provenance": {"trial": ""}, "tiles": [line]}, "trial"
    )


def _call(op: str, material: Material) -> Callable[[int], object]:
    """One call of the operation on a copy of the cache."""
    common, terms = material.common, material.terms
    bounds: dict[str, Any] = {
        "max_query_len": common.max_query_len,
        "max_seq_len": common.max_seq_len,
    }
    attend = _operation(op)
    more = {"workspace": _workspace(material, bounds)} if op == "decode" else {}
    params = AttentionParams(
        scale=terms.scale,
        window=terms.window,
        logits_soft_cap=terms.logits_soft_cap,
        sinks=terms.sinks,
    )
    lengths: tuple[Any, ...] = (common.block_table_tensor, common.query_start_loc, common.seq_lens)

    def call(copy: int) -> None:
        cache = material.caches[copy]
        attend(
            material.query,
            cache.key_cache,
            cache.value_cache,
            *lengths,
            params,
            **bounds,
            **more,
            out=material.output,
        )

    return call


def _operation(op: str) -> Callable[..., None]:
    """The public operation, kept to the kernel whose tiles are tried."""
    room = f"paged_{op.removeprefix('hopper_')}"
    found: Callable[..., None] = getattr(import_module(f"attnlib.ops.triton.{room}"), room)
    return functools.partial(found, kernels="hopper" if op.startswith("hopper_") else "portable")


def _workspace(material: Material, bounds: Mapping[str, Any]) -> torch.Tensor | None:
    """Scratch memory of a decode with the tile that is chosen now."""
    from attnlib.ops.triton.paged_decode import (
        paged_decode_num_splits,
        paged_decode_workspace_bytes,
    )

    spec, query = material.spec, material.query
    splits = paged_decode_num_splits(
        query,
        material.caches[0].key_cache,
        spec.head_size_v,
        num_reqs=material.common.num_reqs,
        window=material.terms.window,
        **bounds,
    )
    needed = paged_decode_workspace_bytes(query.shape[0], spec.num_heads, spec.head_size_v, splits)
    return torch.empty(needed, dtype=torch.uint8, device=material.device) if needed else None


def best_entries(trials: Iterable[Trial], provenance: str) -> list[dict[str, Any]]:
    """What a table says after these trials: an entry for each group, of the tile with the least time over its cases.

    A tile counts for a group when it passed on each of the group's cases; of those, the one with the least geometric mean of its time by that of
    today's tile, which stays where nothing beats it by a margin. Decode groups that differ in work only and came to one tile become one entry.
    """
    groups: dict[Group, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.group, []).append(trial)
    best = {
        group: found for group, members in groups.items() if (found := _best(members)) is not None
    }
    families: dict[Group, list[Group]] = {}
    for group in best:
        families.setdefault(replace(group, work=None), []).append(group)
    return [
        entry
        for family, members in families.items()
        for entry in _entries(family, members, best, provenance)
    ]


def _best(trials: Sequence[Trial]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """(tile, case -> times) of a group; None when no tile passed everywhere or today's was not timed."""
    today = {trial.case: trial for trial in trials if trial.today}
    tiles: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.us:
            tiles.setdefault(repr(sorted(trial.tile.items())), []).append(trial)
    whole = [found for found in tiles.values() if {trial.case for trial in found} == set(today)]
    if not whole or not all(trial.us for trial in today.values()):
        return None

    def by_today(found: Sequence[Trial]) -> float:
        return math.exp(
            sum(math.log((trial.us or 1.0) / (today[trial.case].us or 1.0)) for trial in found)
            / len(found)
        )

    fastest = min(whole, key=by_today)
    chosen = (
        fastest
        if by_today(fastest) < MARGIN
        else next((found for found in whole if found[0].today), fastest)
    )
    times = {
        t.case: {"us": round(t.us or 0.0, 2), "before_us": round(today[t.case].us or 0.0, 2)}
        for t in chosen
    }
    return dict(chosen[0].tile), times


def _entries(
    family: Group,
    members: Sequence[Group],
    best: Mapping[Group, tuple[dict[str, Any], dict[str, Any]]],
    provenance: str,
) -> list[dict[str, Any]]:
    """Lines for one family, in order of work: each reaches from where the one before ends up to its own class, the last without end."""
    line: dict[str, Any] = {
        "op": family.op,
        "products": [family.products],
        "elements": [family.elements],
    }
    line["head_size"] = [family.head_size, family.head_size]
    if family.op == "hopper_prefill":
        line["block_size"] = [family.block_size, family.block_size]
        if family.visible is not None:
            line["visible"] = list(family.visible)
    elif family.op != "hopper_decode":
        line["rows"] = [family.rows, None if family.rows >= 128 else family.rows]
    spans: list[dict[str, Any]] = []
    for group in sorted(members, key=lambda each: each.work or 0):
        tile, times = best[group]
        if spans and spans[-1]["tile"] == tile:
            spans[-1]["end"] = group.work
            spans[-1]["measured"].update(times)
        else:
            spans.append({"tile": tile, "end": group.work, "measured": dict(times)})
    if len(spans) == 1:
        return [
            {
                **line,
                "tile": spans[0]["tile"],
                "measured": spans[0]["measured"],
                "provenance": provenance,
            }
        ]
    begins = [0, *(span["end"] + 1 for span in spans[:-1])]
    ends = [*(span["end"] for span in spans[:-1]), None]
    return [
        {
            **line,
            "keys_per_sm": [begin, end],
            "tile": span["tile"],
            "measured": span["measured"],
            "provenance": provenance,
        }
        for begin, end, span in zip(begins, ends, spans, strict=True)
    ]


def _told(trial: Trial, today: Trial) -> str:
    tile = ", ".join(f"{name} {value}" for name, value in trial.tile.items())
    if trial.us is None:
        return f"    {'':>10}  {tile}: {trial.reason}"
    share = (
        f"  {trial.us / today.us:.2f} x"
        if today.us and not trial.today
        else "  today"
        if trial.today
        else ""
    )
    return f"    {trial.us:>7.1f} us  {tile}{share}"
