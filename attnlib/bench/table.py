"""Rows as text: a line for the case, then one for each backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnlib.bench.backends import PRIMARY
from attnlib.bench.results import Row, Run, ratio

__all__ = ["HEADER", "LEGEND", "case_lines", "heading", "kernel_lines", "summary_line"]

_COLUMNS = (
    ("backend", 28),
    ("us", 10),
    ("rate", 14),
    ("of peak", 8),
    ("vs best", 8),
    ("eager us", 10),
    ("write us", 9),
    ("build us", 9),
    ("layer us", 9),
)
LEGEND = """\
us: one call, by CUDA graph replay on cold caches (eager if marked)
rate: K and V read, or operations on visible pairs, per second
of peak: least time at the peak rates of this run divided by us
vs best: us divided by that of the fastest other backend
eager us: one eager call; write us: cache write
build us, layer us: host time of one build and of one Attention call"""


def _line(cells: Iterable[str]) -> str:
    padded = [
        cell.ljust(width) if number == 0 else cell.rjust(width)
        for number, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True))
    ]
    return "  " + " ".join(padded).rstrip()


HEADER = _line(name for name, _ in _COLUMNS)


def heading(run: Run) -> str:
    """Hardware, versions and peak rates of a run."""
    facts, peaks = run.provenance, run.peaks
    where = facts.get("gpu") or facts.get("cpu", "unknown")
    made = ", ".join(
        f"{name} {facts[name]}" for name in ("torch", "triton", "driver", "commit") if name in facts
    )
    limits = (
        f"peak rates: copy {peaks['copy_gbps']:.0f} GB/s, read {peaks['read_gbps']:.0f} GB/s, "
        f"{peaks['matmul']} {peaks['matmul_tflops']:.3g} TFLOP/s"
    )
    return f"{where}, {made}, {facts.get('date', '')}\n{limits}"


def case_lines(rows: Sequence[Row]) -> str:
    """All rows of one case."""
    first = rows[0]
    batch = f": {first.batch}" if first.batch != first.case and len(first.batch) <= 40 else ""
    return "\n".join(
        [f"{first.case}{batch} · {first.shape}", *(_row_lines(rows, row) for row in rows)]
    )


def _row_lines(rows: Sequence[Row], row: Row) -> str:
    if row.status != "ok":
        shown = "WRONG" if row.status == "wrong" else row.status
        return f"  {row.backend.ljust(_COLUMNS[0][1])} {shown}: {_short(row.reason)}"
    to_best = ratio(rows, row) or _to_best(rows, row)
    cells = [
        row.backend,
        _number(row.us),
        rate(row),
        "" if row.share is None else f"{row.share:.1%}",
        "" if to_best is None else f"{to_best:.3f}",
        *(_number(value) for value in (row.eager_us, row.write_us, row.build_us, row.layer_us)),
    ]
    marks = [] if row.how == "graph" else ["eager"]
    marks += [] if row.checked else ["NOT CHECKED"]
    marks += [_short(row.note)] if row.note else []
    return _line(cells) + (f"  [{'; '.join(marks)}]" if marks else "")


def _to_best(rows: Sequence[Row], row: Row) -> float | None:
    """The time of a row divided by that of the fastest other one of its case, run and timing."""
    others = [
        other.us
        for other in rows
        if other is not row
        and other.status == "ok"
        and other.us
        and (other.case, other.run, other.how) == (row.case, row.run, row.how)
    ]
    return row.us / min(others) if row.us and others else None


def rate(row: Row) -> str:
    """GB/s of keys and values for decodes, TFLOP/s for prefills, "" for mixed batches, which are
    bound by both.
    """
    if row.kind == "decode" and row.gbps is not None:
        return f"{row.gbps:.0f} GB/s" if row.gbps >= 100 else f"{row.gbps:.2g} GB/s"
    if row.kind == "prefill" and row.tflops is not None:
        return f"{row.tflops:.0f} TFLOP/s" if row.tflops >= 10 else f"{row.tflops:.2g} TFLOP/s"
    return ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def _short(text: str, most: int = 160) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def kernel_lines(rows: Sequence[Row]) -> list[str]:
    """Which kernels served a backend that has several: `flash_attn ran FlashAttention 3 (...)`."""
    found = {
        row.backend: sorted(
            {other.kernel for other in rows if other.backend == row.backend and other.kernel}
        )
        for row in rows
    }
    return [
        f"{backend} ran {' and '.join(kernels)}" for backend, kernels in found.items() if kernels
    ]


def summary_line(rows: Sequence[Row], seconds: float) -> str:
    """Number of rows by status, how often triton is at least as fast as the best other backend, and
    the duration.
    """
    counts = {
        status: sum(row.status == status for row in rows)
        for status in dict.fromkeys(row.status for row in rows)
    }
    ratios = [
        found for row in rows if row.backend == PRIMARY and (found := ratio(rows, row)) is not None
    ]
    items = [f"{count} {status}" for status, count in counts.items()]
    if ratios:
        fast = sum(value <= 1.0 for value in ratios)
        items.append(
            f"triton at most 1.00 x the time of the best other backend on {fast} of {len(ratios)} "
            "cases"
        )
    return " · ".join([f"{len(rows)} rows", *items, f"{seconds:.0f} s"])
