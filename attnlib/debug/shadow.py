"""Rerun live calls on a second backend, and keep the error of each layer.

    with attnlib.shadow("torch", every=100) as log:
        model.generate(...)
    print(log)

A sampled call is copied (the pages it touches), attended to again by the second backend and compared. Only where the
two differ by more than rounding is the float64 oracle asked who is right; a live result that is over budget is written
to a file that `attnlib.debug.replay` runs and shrinks.
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
from attnlib.debug.record import capture_call, save_recording
from attnlib.errors import ContractError
from attnlib.testing.backend_under_test import load_backend
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.report import format_table
from attnlib.testing.runner import AttentionOutput, compare_with_oracle, run_materialized_case

__all__ = ["ShadowLog", "ShadowRecord", "shadow", "shadow_call", "watch_for_validation"]

Backend = type[AttentionBackend]

_ROUNDING = 8
"""Units of eps * max(|out|) that two same_precision backends may be apart before the oracle is asked."""


@dataclass(frozen=True)
class ShadowRecord:
    """One call seen twice.

    Attributes:
        layer: its prefix; call: its number.
        out_error, lse_error: largest difference of the two backends; lse_error is None where no LSE was returned.
        message: "" or what the oracle says about the live result.
        path: where the call was written, when it is over budget.
        skipped: why the call could not be shadowed, "" when it was.
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
    """What a shadow saw."""

    backend: str
    records: list[ShadowRecord] = field(default_factory=list)
    calls: int = 0

    @property
    def passed(self) -> bool:
        """Something was compared and no live result was over budget."""
        compared = [record for record in self.records if not record.skipped]
        return bool(compared) and not any(record.message for record in compared)

    def __str__(self) -> str:
        """A line per layer with its largest errors, then every result over budget."""
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
            f"calls against {self.backend}",
            "out error",
            "lse error",
            "over budget",
            "not shadowed",
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
    metadata: Any,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    number: int = 0,
    dump_dir: str | Path | None = None,
) -> ShadowRecord:
    """Rerun one finished call of an `Attention` layer on `backend`.

    Args:
        query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv]: what it was given.
        out [T, Hq, Dv], lse [T, Hq]: what it gave.
        dump_dir: where results over budget are written; None means ATTNLIB_DUMP_DIR.
    """
    name = layer.prefix or type(layer).__name__
    if cache is None:
        return ShadowRecord(name, number, skipped="no cache: unpaged calls are not shadowed")
    try:
        step = capture_call(
            layer.spec.replace(needs_lse=lse is not None),
            query,
            key,
            value,
            cache,
            metadata,
            scale=layer.impl.scale,
            alibi_slopes=layer.impl.alibi_slopes,
            sinks=layer.impl.sinks,
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
    again = run_materialized_case(backend, step)
    out_error = _difference(live.out, again.out)
    lse_error = None if live.lse is None or again.lse is None else _difference(live.lse, again.lse)
    allowed = _ROUNDING * torch.finfo(step.spec.dtype).eps * max(float(again.out.abs().max()), 1e-3)
    if not again.out.numel() or (out_error <= allowed and (lse_error is None or lse_error <= 1e-3)):
        return ShadowRecord(name, number, out_error, lse_error)
    message = compare_with_oracle(step.case, live, live.out.device, truth=step)
    if not message:
        return ShadowRecord(name, number, out_error, lse_error)
    path = save_recording(step, folder / f"{name.replace('/', '_')}-{number}.pt")
    return ShadowRecord(name, number, out_error, lse_error, message, path)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference; equal infinities differ by 0, anything that is not a number by infinity."""
    if not a.numel():
        return 0.0
    gap = torch.where(a == b, 0.0, (a.double() - b.double()).abs())
    return float(gap.nan_to_num(nan=float("inf")).max())


@contextmanager
def shadow(
    backend: str | Backend = "torch", *, every: int = 1, dump_dir: str | Path | None = None
) -> Iterator[ShadowLog]:
    """Shadow a sample of all `Attention` calls of this process while the block runs.

    Args:
        backend: who computes again.
        every: each layer's first call and then one in so many is shadowed.
        dump_dir: where results over budget are written; None means ATTNLIB_DUMP_DIR.

    Raises:
        ContractError: `every` below 1.
    """
    from attnlib.layer import OBSERVERS

    if every < 1:
        raise ContractError(f"every={every} must be at least 1 (1 shadows every call)")
    loaded = load_backend(backend)
    log, seen = ShadowLog(loaded.get_name()), dict[int, int]()

    def observe(layer: Any, *call: Any) -> None:
        count = seen.get(id(layer), 0)
        seen[id(layer)] = count + 1
        log.calls += 1
        if count % every == 0:
            log.records.append(shadow_call(layer, loaded, *call, number=count, dump_dir=dump_dir))

    OBSERVERS.append(observe)
    try:
        yield log
    finally:
        OBSERVERS.remove(observe)


def watch_for_validation() -> None:
    """ATTNLIB_VALIDATE=2: from now on every call is shadowed by `torch`, and one that is over budget is a warning."""
    from attnlib.layer import OBSERVERS

    if _validate not in OBSERVERS:
        OBSERVERS.append(_validate)


def _validate(layer: Any, *call: Any) -> None:
    if env.read("ATTNLIB_VALIDATE") != 2 or layer.backend.get_name() == "torch":
        return
    record = shadow_call(layer, load_backend("torch"), *call)
    if record.message:
        warnings.warn(
            f"{record.layer} on {layer.backend.get_name()} differs from the torch backend: {record.message}; "
            f"written to {record.path}, run it again with `attnlib replay`",
            stacklevel=2,
        )
