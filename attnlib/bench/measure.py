"""One case on all contenders: refuse, build, judge, then time in turns. What fails says why, and the others go on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from attnlib.bench.backends import Contender
from attnlib.bench.case import BenchCase
from attnlib.bench.correctness import Gate, contested_rows
from attnlib.bench.inputs import make_material
from attnlib.bench.peaks import Ceilings
from attnlib.bench.results import Row
from attnlib.bench.runner import Entry, enter, told, unmeasured
from attnlib.bench.timer import EagerWatch, GraphWatch, Reading, host_us, take_turns, wind_up
from attnlib.bench.work import flops, kv_bytes, roofline_us
from attnlib.testing.budget import Comparison

__all__ = ["DeviceLostError", "answers", "measure_case"]

_CONTESTED = 8


class DeviceLostError(RuntimeError):
    """The device answers no more: a kernel has broken its context, and nothing else can be measured in this process."""


@torch.inference_mode()
def measure_case(
    case: BenchCase,
    contenders: Sequence[Contender],
    device: torch.device,
    ceilings: Ceilings,
    *,
    graphs: bool = False,
    check: bool = True,
) -> list[Row]:
    """Rows of one case, a contender each, in their order.

    Args:
        ceilings: of this run, for shares.
        graphs: time CUDA graphs; else eager calls.
        check: judge before timing; without it rows say so.

    Raises:
        DeviceLostError: a kernel has broken the device's context.
    """
    rows = {one.label: _turned_away(case, one, device) for one in contenders}
    able = [one for one in contenders if rows[one.label] is None]
    entries: list[Entry] = []
    try:
        material = make_material(case, device) if able else None
    except Exception as error:  # out of memory, most likely: the other cases may be smaller
        rows.update(
            {
                one.label: unmeasured(case, one.label, "failed", f"no tensors: {told(error)}")
                for one in able
            }
        )
        material = None
    if material is not None:
        for one in able:
            with _guarded(case, one.label, rows, device):
                entries.append(enter(case, one, material))
        gate = Gate(material) if check else None
        right = _judged(entries, gate, rows, device) if gate else entries
        _time(right, gate, rows, device, graphs, ceilings)
    result = [
        row
        if (row := rows[one.label]) is not None
        else unmeasured(case, one.label, "failed", "no result")
        for one in contenders
    ]
    material, able = None, []
    entries.clear()
    _release(device)
    return result


Rows = dict[str, Row | None]


def _turned_away(case: BenchCase, one: Contender, device: torch.device) -> Row | None:
    """The row of a contender that is not here or refuses the case; None when it takes part."""
    if one.absent or one.backend is None:
        return unmeasured(case, one.label, "unavailable", "; ".join(one.absent))
    try:
        reasons = one.backend.validate_configuration(case.spec, device)
    except Exception as error:  # somebody else's code
        return unmeasured(case, one.label, "failed", f"validate_configuration: {told(error)}")
    return unmeasured(case, one.label, "refused", "; ".join(reasons)) if reasons else None


@contextmanager
def _guarded(case: BenchCase, label: str, rows: Rows, device: torch.device) -> Iterator[None]:
    """Whatever a contender raises becomes its row; only a lost device ends the run."""
    try:
        yield
    except Exception as error:  # a failing backend must not cost the others their times
        rows[label] = unmeasured(case, label, "failed", told(error))
        if not answers(device):
            raise DeviceLostError(
                f"{label} on {case.name} broke the device: {told(error)}"
            ) from error


def answers(device: torch.device) -> bool:
    """Whether the device still works: after a kernel's illegal access it does not, until the process ends."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:  # torch has several kinds of errors for it
        return False
    return True


def _judged(entries: list[Entry], gate: Gate, rows: Rows, device: torch.device) -> list[Entry]:
    """Those whose answer is right; rows of the others say what is wrong."""
    right: list[Entry] = []
    for entry in entries:
        with _guarded(entry.material.case, entry.label, rows, device):
            assert entry.output is not None  # enter has made it
            if _passes(entry, gate.judge(entry.output), rows) and _passes(
                entry, gate.judge_write(entry.layer.impl), rows
            ):
                right.append(entry)
    if len(right) < 2:
        return right
    first = right[0].output
    contested: dict[int, None] = {}
    for entry in right[1:]:
        if first is not None and entry.output is not None:
            contested.update(dict.fromkeys(contested_rows(first, entry.output, _CONTESTED)))
    chosen = sorted(contested)
    agreed: list[Entry] = []
    for entry in right:
        with _guarded(entry.material.case, entry.label, rows, device):
            if entry.output is not None and _passes(entry, gate.judge(entry.output, chosen), rows):
                agreed.append(entry)
    return agreed


def _passes(entry: Entry, found: Comparison, rows: Rows) -> bool:
    if not found.passed:
        rows[entry.label] = replace(entry.row, status="wrong", reason=str(found))
        return False
    if found.max_allowed:
        entry.row = replace(
            entry.row, error=max(entry.row.error or 0.0, found.max_error / found.max_allowed)
        )
    entry.row = replace(entry.row, checked=True)
    return True


def _time(
    entries: list[Entry],
    gate: Gate | None,
    rows: Rows,
    device: torch.device,
    graphs: bool,
    ceilings: Ceilings,
) -> None:
    """Wind up every stopwatch, then let them take turns; host times last."""
    watches: dict[str, EagerWatch | GraphWatch] = {}
    for entry in entries:
        entry.output = None
        with _guarded(entry.material.case, entry.label, rows, device):
            entry.expected_us = wind_up(entry.attend, device)
            watch = _watch(entry, graphs, device)
            if (
                gate is None
                or not isinstance(watch, GraphWatch)
                or _replays_right(entry, watch, gate, rows)
            ):
                watches[entry.label] = watch
    ready = [entry for entry in entries if entry.label in watches]
    readings = _readings(ready, watches, rows, device)
    watches.clear()
    for entry in ready:
        reading = readings.get(entry.label)
        if reading is None:
            continue
        entry.row = replace(
            entry.row,
            us=reading.us,
            low_us=reading.low,
            high_us=reading.high,
            calls=reading.calls,
            rounds=reading.rounds,
        )
        rows[entry.label] = _rated(entry.row, entry.material.case, ceilings)
        _add_times(entry, rows, graphs, device)


def _readings(
    ready: list[Entry],
    watches: dict[str, EagerWatch | GraphWatch],
    rows: Rows,
    device: torch.device,
) -> dict[str, Reading]:
    """All in turns; where one of them fails, each by itself, so that the others keep their times."""
    expected = {entry.label: entry.expected_us for entry in ready}
    try:
        return take_turns(watches, expected)
    except Exception:  # who it was shows below
        found: dict[str, Reading] = {}
        for entry in ready:
            with _guarded(entry.material.case, entry.label, rows, device):
                found.update(take_turns({entry.label: watches[entry.label]}, expected))
        return found


def _watch(entry: Entry, graphs: bool, device: torch.device) -> EagerWatch | GraphWatch:
    copies = len(entry.material.caches)
    if graphs:
        try:
            watch = GraphWatch(entry.attend, copies, device, entry.expected_us)
            entry.row = replace(entry.row, how="graph")
            return watch
        except Exception as error:  # a backend that cannot be captured is shown with its eager time
            if not answers(device):
                raise
            entry.row = replace(entry.row, note=f"no graph: {told(error.__context__ or error)}")
    entry.row = replace(entry.row, how="eager")
    return EagerWatch(entry.attend, copies, device, entry.expected_us)


def _replays_right(entry: Entry, watch: GraphWatch, gate: Gate, rows: Rows) -> bool:
    """Whether the graph computes what the eager call did: it is the graph that is timed."""
    entry.material.output.fill_(float("nan"))
    watch.replay()
    found = gate.judge(entry.material.output)
    if not found.passed:
        rows[entry.label] = replace(
            entry.row, status="wrong", reason=f"replayed from a CUDA graph: {found}"
        )
    return found.passed


def _add_times(entry: Entry, rows: Rows, graphs: bool, device: torch.device) -> None:
    """Fill in what stands beside the main time; a failure there is a note, because the main time was measured and stays."""
    for name, measure in _beside(entry, graphs, device).items():
        kept, failed = rows[entry.label], Rows()
        assert kept is not None  # the main time has been written
        with _guarded(entry.material.case, entry.label, failed, device):
            rows[entry.label] = replace(kept, **measure())  # type: ignore[arg-type]  # its keys are fields that hold times
        broken = failed.get(entry.label)
        if broken is not None:
            rows[entry.label] = replace(
                kept,
                note="; ".join(
                    filter(None, (kept.note, f"no time for the {name}: {broken.reason}"))
                ),
            )


def _beside(
    entry: Entry, graphs: bool, device: torch.device
) -> dict[str, Callable[[], dict[str, float | None]]]:
    """What is measured beside the main time, each by itself: eager calls, the cache write, host times."""
    copies, expected = len(entry.material.caches), entry.expected_us
    few = max(min(int(20_000 / max(expected, 1.0)), 20), 1)

    def eager() -> dict[str, float | None]:
        reading = take_turns(
            {"it": EagerWatch(entry.attend, copies, device, expected)}, {"it": expected}
        )["it"]
        return {"eager_us": reading.us, "host_us": reading.host_us}

    def write() -> dict[str, float | None]:
        took = wind_up(entry.write, device)
        watch = (GraphWatch if graphs else EagerWatch)(entry.write, copies, device, took)
        return {"write_us": take_turns({"it": watch}, {"it": took})["it"].us}

    return {
        "eager call": eager,
        "cache write": write,
        "build": lambda: {
            "build_us": host_us(lambda: entry.builder.build(0, entry.material.common), device, 5)
        },
        "layer call": lambda: {"layer_us": host_us(entry.call, device, few)},
    }


def _rated(row: Row, case: BenchCase, ceilings: Ceilings) -> Row:
    if not row.us:
        return row
    return replace(
        row,
        gbps=kv_bytes(case) / row.us / 1e3,
        tflops=flops(case) / row.us / 1e6,
        share=roofline_us(case, ceilings.read_gbps, ceilings.matmul_tflops) / row.us,
    )


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
