"""One case on all contenders: refuse, build, judge, then time in turns. What fails says why, and the others go on."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.bench.case import BenchCase
from attnlib.bench.ceilings import Ceilings
from attnlib.bench.contenders import Contender
from attnlib.bench.gate import Gate, contested_rows
from attnlib.bench.material import Material, make_material
from attnlib.bench.results import Row
from attnlib.bench.stopwatch import EagerWatch, GraphWatch, Reading, host_us, take_turns, wind_up
from attnlib.bench.work import flops, kv_bytes, roofline_us
from attnlib.layer import Attention
from attnlib.testing.budget import Comparison

__all__ = ["DeviceLostError", "answers", "measure_case", "unmeasured"]

_CONTESTED = 8


class DeviceLostError(RuntimeError):
    """The device answers no more: a kernel has broken its context, and nothing else can be measured in this process."""


@dataclass
class _Entry:
    """A contender at work on one case: the layer, its batch, and the row as far as it is known."""

    label: str
    material: Material
    layer: Attention
    builder: Any
    metadata: Any
    row: Row
    output: torch.Tensor | None = None
    expected_us: float = 0.0

    def attend(self, copy: int) -> None:
        """One forward over one copy of the cache, into the case's own output."""
        material = self.material
        self.layer.impl.forward(material.query, material.caches[copy], self.metadata, material.output)

    def write(self, copy: int) -> None:
        """One cache write."""
        material = self.material
        self.layer.impl.write_kv(material.key, material.value, material.caches[copy], material.slots)

    def call(self) -> None:
        """One call of the layer: check, write, attend."""
        m = self.material
        self.layer(m.query, m.key, m.value, m.caches[0], self.metadata, output=m.output)


def unmeasured(case: BenchCase, label: str, status: str, reason: str) -> Row:
    """A row without times."""
    return Row(
        case=case.name, kind=case.kind, batch=str(case.batch), shape=case.shape, settings=case.to_json(), backend=label, status=status, reason=reason
    )


@torch.inference_mode()
def measure_case(
    case: BenchCase, contenders: Sequence[Contender], device: torch.device, ceilings: Ceilings, *, graphs: bool = True, check: bool = True
) -> list[Row]:
    """Rows of one case, a contender each, in their order.

    Args:
        ceilings: of this run, for shares.
        graphs: time CUDA graphs where the device has them; else eager calls.
        check: judge before timing; without it rows say so.

    Raises:
        DeviceLostError: a kernel has broken the device's context.
    """
    rows = {one.label: _turned_away(case, one, device) for one in contenders}
    able = [one for one in contenders if rows[one.label] is None]
    entries: list[_Entry] = []
    try:
        material = make_material(case, device) if able else None
    except Exception as error:  # out of memory, most likely: the other cases may be smaller
        rows.update({one.label: unmeasured(case, one.label, "failed", f"no tensors: {_told(error)}") for one in able})
        material = None
    if material is not None:
        for one in able:
            with _guarded(case, one.label, rows, device):
                entries.append(_enter(case, one, material))
        right = _judged(entries, material, rows, device) if check else entries
        _time(right, rows, device, graphs and device.type == "cuda", ceilings)
    result = [row if (row := rows[one.label]) is not None else unmeasured(case, one.label, "failed", "no result") for one in contenders]
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
        return unmeasured(case, one.label, "failed", f"validate_configuration: {_told(error)}")
    return unmeasured(case, one.label, "refused", "; ".join(reasons)) if reasons else None


@contextmanager
def _guarded(case: BenchCase, label: str, rows: Rows, device: torch.device) -> Iterator[None]:
    """Whatever a contender raises becomes its row; only a lost device ends the run."""
    try:
        yield
    except Exception as error:  # a failing backend must not cost the others their times
        rows[label] = unmeasured(case, label, "failed", _told(error))
        if not answers(device):
            raise DeviceLostError(f"{label} on {case.name} broke the device: {_told(error)}") from error


def answers(device: torch.device) -> bool:
    """Whether the device still works: after a kernel's illegal access it does not, until the process ends."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:  # torch has several kinds of errors for it
        return False
    return True


def _told(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _enter(case: BenchCase, one: Contender, material: Material) -> _Entry:
    """Layer, builder, batch, and the first call, which compiles."""
    backend: type[AttentionBackend] | None = one.backend
    assert backend is not None  # it was not turned away
    spec, device = material.spec, material.device
    layer = Attention(spec, backend=backend, sinks=material.terms.sinks, prefix="bench", device=device)
    builder = backend.make_builder(spec, device)
    metadata = builder.build(0, material.common)
    row = replace(unmeasured(case, one.label, "ok", ""), copies=len(material.caches), kernel=_kernel(metadata))
    entry = _Entry(one.label, material, layer, builder, metadata, row)
    material.output.fill_(float("nan"))
    start = time.perf_counter()
    entry.attend(0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    entry.row = replace(row, first_call_s=time.perf_counter() - start)
    entry.output = material.output.clone()
    return entry


def _kernel(metadata: Any) -> str:
    """What the batch says it runs on, where a backend has several kernels (FlashAttention's generations)."""
    kernel = metadata.asdict_zerocopy().get("kernel")
    return str(getattr(kernel, "label", kernel)) if kernel is not None else ""


def _judged(entries: list[_Entry], material: Material, rows: Rows, device: torch.device) -> list[_Entry]:
    """Those whose answer is right; rows of the others say what is wrong."""
    gate = Gate(material)
    right: list[_Entry] = []
    for entry in entries:
        with _guarded(material.case, entry.label, rows, device):
            assert entry.output is not None  # _enter has made it
            if _passes(entry, gate.judge(entry.output), rows) and _passes(entry, gate.judge_write(entry.layer.impl), rows):
                right.append(entry)
    if len(right) < 2:
        return right
    first = right[0].output
    contested: dict[int, None] = {}
    for entry in right[1:]:
        if first is not None and entry.output is not None:
            contested.update(dict.fromkeys(contested_rows(first, entry.output, _CONTESTED)))
    chosen = sorted(contested)
    agreed: list[_Entry] = []
    for entry in right:
        with _guarded(material.case, entry.label, rows, device):
            if entry.output is not None and _passes(entry, gate.judge(entry.output, chosen), rows):
                agreed.append(entry)
    return agreed


def _passes(entry: _Entry, found: Comparison, rows: Rows) -> bool:
    if not found.passed:
        rows[entry.label] = replace(entry.row, status="wrong", reason=str(found))
        return False
    if found.max_allowed:
        entry.row = replace(entry.row, error=max(entry.row.error or 0.0, found.max_error / found.max_allowed))
    entry.row = replace(entry.row, checked=True)
    return True


def _time(entries: list[_Entry], rows: Rows, device: torch.device, graphs: bool, ceilings: Ceilings) -> None:
    """Wind up every stopwatch, then let them take turns; host times last."""
    watches: dict[str, EagerWatch | GraphWatch] = {}
    for entry in entries:
        entry.output = None
        with _guarded(entry.material.case, entry.label, rows, device):
            entry.expected_us = wind_up(entry.attend, device)
            watches[entry.label] = _watch(entry, graphs, device)
    ready = [entry for entry in entries if entry.label in watches]
    readings = _readings(ready, watches, rows, device)
    watches.clear()
    for entry in ready:
        reading = readings.get(entry.label)
        if reading is None:
            continue
        entry.row = replace(entry.row, us=reading.us, low_us=reading.low, high_us=reading.high, calls=reading.calls, rounds=reading.rounds)
        rows[entry.label] = _rated(entry.row, entry.material.case, ceilings)
        with _guarded_note(entry, rows, device):
            rows[entry.label] = replace(rows[entry.label] or entry.row, **_beside(entry, graphs, device))


def _readings(ready: list[_Entry], watches: dict[str, EagerWatch | GraphWatch], rows: Rows, device: torch.device) -> dict[str, Reading]:
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


def _watch(entry: _Entry, graphs: bool, device: torch.device) -> EagerWatch | GraphWatch:
    copies = len(entry.material.caches)
    if graphs:
        try:
            watch = GraphWatch(entry.attend, copies, device, entry.expected_us)
            entry.row = replace(entry.row, how="graph")
            return watch
        except Exception as error:  # a backend that cannot be captured is shown with its eager time
            torch.cuda.synchronize(device)
            entry.row = replace(entry.row, note=f"no graph: {_told(error)}")
    entry.row = replace(entry.row, how="eager")
    return EagerWatch(entry.attend, copies, device, entry.expected_us)


@contextmanager
def _guarded_note(entry: _Entry, rows: Rows, device: torch.device) -> Iterator[None]:
    """A failure beside the main time is a note: the time was measured and stays."""
    kept = rows[entry.label]
    failed: Rows = {}
    with _guarded(entry.material.case, entry.label, failed, device):
        yield
    broken = failed.get(entry.label)
    if broken is not None and kept is not None:
        rows[entry.label] = replace(kept, note="; ".join(filter(None, (kept.note, f"other times missing: {broken.reason}"))))


def _beside(entry: _Entry, graphs: bool, device: torch.device) -> dict[str, Any]:
    """Eager time, cache write and host times."""
    copies = len(entry.material.caches)
    eager = take_turns({"it": EagerWatch(entry.attend, copies, device, entry.expected_us)}, {"it": entry.expected_us})["it"]
    write_us = wind_up(entry.write, device)
    kind = GraphWatch if graphs else EagerWatch
    written = take_turns({"it": kind(entry.write, copies, device, write_us)}, {"it": write_us})["it"]
    few = max(min(int(20_000 / max(entry.expected_us, 1.0)), 20), 1)
    return {
        "eager_us": eager.us,
        "host_us": eager.host_us,
        "write_us": written.us,
        "build_us": host_us(lambda: entry.builder.build(0, entry.material.common), device, 5),
        "layer_us": host_us(entry.call, device, few),
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
