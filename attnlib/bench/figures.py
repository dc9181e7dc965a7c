"""Plots of results: decode bandwidth, prefill rate, and the time of `triton` relative to the best
other backend.

Plots depend on the document only, so they can be drawn again from the committed JSON on any
machine. The colors are the color-blind safe palette of Okabe and Ito, and each backend has its own
marker.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnlib.bench.backends import PRIMARY
from attnlib.bench.plots import (
    GREY,
    STYLE,
    draw_legend,
    draw_peak,
    draw_points,
    label_of,
    requests_of,
    set_axis,
    styles_of,
    timed_rows,
)
from attnlib.bench.results import Document, Row, ratio

__all__ = ["draw_figures"]

_BETTER, _WORSE = "#0072B2", "#D55E00"
_WIDTH = 8.0


def draw_figures(document: Document, folder: str | Path) -> list[Path]:
    """Draw `decode`, `prefill` and `ratio` as SVG and PNG, as far as the document has rows for
    them.

    Returns:
        The files written.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    plots: dict[str, Callable[[Document, Any], Any]] = {
        "decode": _decode,
        "prefill": _prefill,
        "ratio": _ratio,
    }
    with matplotlib.rc_context(STYLE):
        for name, draw in plots.items():
            figure = draw(document, pyplot)
            if figure is None:
                continue
            figure.text(
                0.995, 0.004, _caption(document), ha="right", va="bottom", fontsize=6.5, color=GREY
            )
            for kind in ("svg", "png"):
                path = target / f"{name}.{kind}"
                figure.savefig(path, dpi=160, metadata={"Date": None} if kind == "svg" else None)
                written.append(path)
            pyplot.close(figure)
    return written


def _caption(document: Document) -> str:
    lines = []
    for index, run in enumerate(document.runs):
        if any(row.run == index for row in document.rows):
            facts = run.provenance
            where = facts.get("gpu") or facts.get("cpu", "unknown")
            versions = f"torch {facts.get('torch')}, triton {facts.get('triton')}"
            commit = f"attnlib {facts.get('commit')}, {facts.get('date')}"
            lines.append(f"{where}, {versions}, {commit}")
    return (
        "   |   ".join(dict.fromkeys(lines))
        if len(lines) < 3
        else f"{lines[0]}   and {len(lines) - 1} more runs"
    )


def _decode(document: Document, pyplot: Any) -> Any:
    """GB/s of keys and values, cases in order of the bytes they read."""
    rows = [row for row in timed_rows(document, "decode") if row.gbps]
    if not rows:
        return None
    size = {row.case: float(round((row.gbps or 0.0) * (row.us or 0.0))) for row in rows}
    cases = sorted(dict.fromkeys(row.case for row in rows), key=lambda case: size[case])
    labels = {row.case: label_of(row) for row in rows}
    style = styles_of(rows)
    figure, axes = pyplot.subplots(figsize=(_WIDTH, 4.4), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.9))
    draw_points(axes, cases, rows, lambda row: row.gbps, style)
    set_axis(
        axes,
        [f"{labels[case]}\n{_megabytes(size[case])}" for case in cases],
        "Decode: keys and values read per second, sorted by bytes read",
    )
    axes.tick_params(axis="x", labelsize=7.5)
    axes.set_ylabel("GB/s")
    draw_peak(axes, document, rows, "read_gbps", "GB/s read")
    draw_legend(figure, style, pyplot)
    return figure


def _megabytes(thousands: float) -> str:
    """GB/s times microseconds are thousands of bytes."""
    megabytes = thousands / 1e3
    if megabytes >= 1000:
        return f"{megabytes / 1e3:.2g} GB"
    return f"{megabytes:.0f} MB" if megabytes >= 10 else f"{megabytes:.2g} MB"


def _prefill(document: Document, pyplot: Any) -> Any:
    """TFLOP/s over visible pairs, a panel for each page size."""
    rows = [row for row in timed_rows(document, "prefill") if row.tflops]
    if not rows:
        return None
    pages = sorted({int(row.settings.get("block_size", 0)) for row in rows})
    groups = [
        [row for row in rows if int(row.settings.get("block_size", 0)) == page] for page in pages
    ]
    counts = [len({row.case for row in group}) for group in groups]
    style = styles_of(rows)
    figure, panels = pyplot.subplots(
        1,
        len(pages),
        figsize=(_WIDTH, 4.0),
        sharey=True,
        squeeze=False,
        layout="constrained",
        width_ratios=[count + 1 for count in counts],
    )
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.9))
    for axes, page, group in zip(panels[0], pages, groups, strict=True):
        order = {row.case: (_special(row), *_pairs(row)) for row in group}
        cases = sorted(order, key=lambda case: order[case])
        labels = {row.case: label_of(row) for row in group}
        draw_points(axes, cases, group, lambda row: row.tflops, style)
        set_axis(axes, [labels[case] for case in cases], f"Prefill, page {page}")
    panels[0][0].set_ylabel("TFLOP/s over visible pairs")
    for axes in panels[0]:
        draw_peak(axes, document, rows, "matmul_tflops", "TFLOP/s")
    draw_legend(figure, style, pyplot)
    return figure


def _special(row: Row) -> bool:
    """True for windows and other head sizes, which are plotted after the ordinary cases."""
    return row.settings.get("head_size") != 128 or bool(row.settings.get("sliding_window"))


def _pairs(row: Row) -> tuple[int, int]:
    """(longest sequence, query tokens), to sort prefills."""
    requests = requests_of(row)
    return max(seq for _, seq in requests), sum(query for query, _ in requests)


def _ratio(document: Document, pyplot: Any) -> Any:
    """The time of `triton` divided by that of the best other backend, one bar for each case."""
    found = [
        (row, value)
        for row in document.rows
        if row.backend == PRIMARY and (value := ratio(document.rows, row)) is not None
    ]
    if not found:
        return None
    figure, axes = pyplot.subplots(figsize=(_WIDTH, 0.9 + 0.21 * len(found)), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))
    values = [value for _, value in found]
    colors = [_BETTER if value <= 1 else _WORSE for value in values]
    bars = axes.barh(range(len(found)), values, color=colors, height=0.7)
    for bar, value in zip(bars, values, strict=True):
        bar.set_hatch("" if value <= 1 else "////")
        bar.set_edgecolor("white")
    axes.axvline(1.0, color="black", linewidth=1, zorder=1.5)
    paper = {
        "facecolor": "white",
        "edgecolor": "none",
        "pad": 0.6,
    }  # keeps the line at 1 from crossing the numbers
    axes.bar_label(
        bars, labels=[f"{value:.2f}" for value in values], padding=3, fontsize=8, bbox=paper
    )
    axes.set_yticks(range(len(found)), [row.case for row, _ in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, max(1.1, max(values) * 1.1))
    axes.set_xlabel("time of triton / time of the best other backend, same run (hatched: slower)")
    axes.set_title("triton relative to the best other backend (lower is better)", loc="left")
    return figure
