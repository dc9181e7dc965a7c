"""Run live attention calls again on a second backend and record the error of each layer.

    with shadow("torch", every=100) as log:
        model.generate(...)
    print(log)

A sampled call is copied with the cache blocks that it uses and run on the second backend. If the
two results differ by more than rounding, the live result is compared with the float64 oracle. A
live result above the error budget is written to a file for `attnlib replay`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attnlib import env
from attnlib.backends.base import AttentionBackend
from attnlib.debug.capture import capture_layer_call
from attnlib.debug.counted_calls import CountedCalls, new_path
from attnlib.debug.recording import save_recording
from attnlib.errors import ContractError
from attnlib.instrumentation import OBSERVERS
from attnlib.metadata.base import AttentionMetadata
from attnlib.testing.backend_under_test import load_backend
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.report import format_table
from attnlib.testing.runner import AttentionOutput, compare_with_oracle, run_materialized_case

__all__ = ["ShadowLog", "ShadowRecord", "enable_validation_shadow", "shadow", "shadow_call"]

Backend = type[AttentionBackend]

_ROUNDING = 8
"""Differences up to this multiple of eps * max(|out|) are not compared with the oracle."""


@dataclass(frozen=True)
class ShadowRecord:
    """The comparison of one call.

    Attributes:
        layer: prefix of the layer.
        call: number of the call in this layer.
        out_error: largest absolute difference of the outputs.
        lse_error: largest absolute difference of the LSEs; None if the call returns no LSE.
        message: the errors of a live result above the budget, otherwise "".
        path: the recording of a call above the budget.
        skipped: the reason if the call was not compared, otherwise "".
    """

    layer: str
    call: int
    out_error: float = 0.0
    lse_error: float | None = None
    message: str = ""
    path: Path | None = None
    skipped: str = ""


@dataclass
class ShadowLog:
    """The comparisons of one `shadow` block.

    Attributes:
        backend: name of the second backend.
        records: the compared or skipped calls.
        calls: number of calls, including those that were not sampled.
    """

    backend: str
    records: list[ShadowRecord] = field(default_factory=list)
    calls: int = 0

    @property
    def passed(self) -> bool:
        """True if at least one call was compared and no live result is above the budget."""
        compared = [record for record in self.records if not record.skipped]
        return bool(compared) and not any(record.message for record in compared)

    def __str__(self) -> str:
        """One line per layer with its largest errors, followed by the results above the budget."""
        by_layer: dict[str, list[ShadowRecord]] = {}
        for record in self.records:
            by_layer.setdefault(record.layer, []).append(record)
        rows = []
        for layer, records in by_layer.items():
            done = [record for record in records if not record.skipped]
            lse = [record.lse_error for record in done if record.lse_error is not None]
            rows.append(
                (
                    layer,
                    str(len(done)),
                    f"{max((record.out_error for record in done), default=0.0):.2e}",
                    f"{max(lse):.2e}" if lse else "-",
                    str(sum(bool(record.message) for record in done)),
                    next((record.skipped for record in records if record.skipped), ""),
                )
            )
        header = (
            "layer",
            f"calls compared with {self.backend}",
            "out error",
            "lse error",
            "over budget",
            "not compared",
        )
        wrong = [
            f"{r.layer} call {r.call}: {r.message}; written to {r.path}"
            for r in self.records
            if r.message
        ]
        return "\n".join([format_table(header, rows), *wrong])


@torch.no_grad()
def shadow_call(
    layer: Any,
    backend: Backend,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: Any,
    metadata: AttentionMetadata,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    name: str = "",
    number: int = 0,
    dump_dir: str | Path | None = None,
) -> ShadowRecord:
    """Run one completed call of an `Attention` layer again on `backend`.

    Args:
        layer: the layer.
        backend: the second backend.
        query, key, value: inputs of the call, [T, Hq, D], [T, Hkv, D] and [T, Hkv, Dv].
        cache, metadata: inputs of the call.
        out: output of the call, [T, Hq, Dv].
        lse: LSE of the call, [T, Hq] float32, or None.
        name: of the layer in the record; by default its prefix.
        number: number of the call in this layer.
        dump_dir: folder for recordings; None means ATTNLIB_DUMP_DIR.
    """
    name = name or layer.prefix or type(layer).__name__
    if cache is None:
        return ShadowRecord(name, number, skipped="calls without a cache are not compared")
    try:
        step = capture_layer_call(
            layer, query, key, value, cache, metadata, needs_lse=lse is not None
        )
    except ContractError as error:
        return ShadowRecord(name, number, skipped=str(error))
    if reasons := backend.validate_configuration(step.spec, query.device):
        return ShadowRecord(name, number, skipped=f"{backend.get_name()}: {'; '.join(reasons)}")
    folder = Path(dump_dir or env.read("ATTNLIB_DUMP_DIR"))
    return _compare(step, backend, AttentionOutput(out, lse), name, number, folder)


def _compare(
    step: MaterializedCase,
    backend: Backend,
    live: AttentionOutput,
    name: str,
    number: int,
    folder: Path,
) -> ShadowRecord:
    second = run_materialized_case(backend, step)
    out_error = _difference(live.out, second.out)
    lse_error = (
        None if live.lse is None or second.lse is None else _difference(live.lse, second.lse)
    )
    allowed = (
        _ROUNDING * torch.finfo(step.spec.dtype).eps * max(float(second.out.abs().max()), 1e-3)
    )
    if not second.out.numel() or (
        out_error <= allowed and (lse_error is None or lse_error <= 1e-3)
    ):
        return ShadowRecord(name, number, out_error, lse_error)
    message = compare_with_oracle(step.case, live, live.out.device, reference=step)
    if not message:
        return ShadowRecord(name, number, out_error, lse_error)
    path = save_recording(step, new_path(folder, name, number))
    return ShadowRecord(name, number, out_error, lse_error, message, path)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; 0 for equal infinities, infinity for NaN."""
    if not a.numel():
        return 0.0
    difference = torch.where(a == b, 0.0, (a.double() - b.double()).abs())
    return float(difference.nan_to_num(nan=float("inf")).max())


@contextmanager
def shadow(
    backend: str | Backend = "torch", *, every: int = 1, dump_dir: str | Path | None = None
) -> Iterator[ShadowLog]:
    """Compare a sample of all `Attention` calls of this process inside the `with` block.

    Args:
        backend: the second backend.
        every: compare the first call and then every `every`-th call of each layer.
        dump_dir: folder for recordings of results above the budget; None means ATTNLIB_DUMP_DIR.

    Raises:
        ContractError: `every` is less than 1.
    """
    if every < 1:
        raise ContractError(f"every={every} must be at least 1 (1 compares every call)")
    loaded = load_backend(backend)
    log, counted = ShadowLog(loaded.get_name()), CountedCalls()

    def observe(layer: Any, *call: Any) -> None:
        name, number = counted.next(layer)
        log.calls += 1
        if number % every == 0:
            record = shadow_call(layer, loaded, *call, name=name, number=number, dump_dir=dump_dir)
            log.records.append(record)

    OBSERVERS.append(observe)
    try:
        yield log
    finally:
        OBSERVERS.remove(observe)


def enable_validation_shadow() -> None:
    """ATTNLIB_VALIDATE=2: compare all later calls with `torch`; warn if one is above the budget."""
    if _validate not in OBSERVERS:
        OBSERVERS.append(_validate)


def _validate(layer: Any, *call: Any) -> None:
    if env.read("ATTNLIB_VALIDATE") != 2 or layer.backend.get_name() == "torch":
        return
    record = shadow_call(layer, load_backend("torch"), *call)
    if record.message:
        warnings.warn(
            f"{record.layer} on {layer.backend.get_name()} differs from the torch backend: "
            f"{record.message}; the call is recorded in {record.path}: run it again with "
            "`attnlib replay`",
            stacklevel=2,
        )
