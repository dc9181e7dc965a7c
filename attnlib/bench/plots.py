"""Parts of plots: colors, markers, labels of rows, axes and legends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnlib.bench.backends import PRIMARY
from attnlib.bench.results import Document, Row
from attnlib.testing.batch_spec import parse_batch

__all__ = [
    "COLORS",
    "GREY",
    "MARKERS",
    "STYLE",
    "draw_legend",
    "draw_peak",
    "draw_points",
    "label_of",
    "requests_of",
    "set_axis",
    "styles_of",
    "timed_rows",
]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


MARKERS = ("o", "s", "^", "D", "v", "P", "X")


GREY = "#555555"


STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "attnlib",  # equal rows give equal files
    "svg.fonttype": "path",
}


def timed_rows(document: Document, kind: str) -> list[Row]:
    return [row for row in document.rows if row.kind == kind and row.us]


def styles_of(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Backend -> color and marker; `triton` has the first ones."""
    names = sorted(dict.fromkeys(row.backend for row in rows), key=lambda name: name != PRIMARY)
    return {
        name: (COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)])
        for place, name in enumerate(names)
    }


def requests_of(row: Row) -> list[tuple[int, int]]:
    """(query length, sequence length) of each request."""

    batch = parse_batch(row.batch)
    return list(batch.lengths)


def label_of(row: Row) -> str:
    """The name of the case without the parts that the axis shows."""
    name = row.case.removeprefix("cpu-").removeprefix(f"{row.kind}-")
    return name.removesuffix(f"-p{row.settings.get('block_size')}")


def draw_points(
    axes: Any,
    cases: Sequence[str],
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    style: dict[str, tuple[str, str]],
) -> None:
    """One marker for each backend and case; the markers of a case are next to each other."""
    step = min(0.2, 0.7 / len(style))
    for place, (backend, (color, marker)) in enumerate(style.items()):
        mine = {row.case: value(row) for row in rows if row.backend == backend}
        shift = (place - (len(style) - 1) / 2) * step
        where = [index + shift for index, case in enumerate(cases) if mine.get(case) is not None]
        heights = [mine[case] for case in cases if mine.get(case) is not None]
        axes.plot(
            where,
            heights,
            linestyle="none",
            marker=marker,
            color=color,
            markersize=5.5,
            label=backend,
        )


def set_axis(axes: Any, labels: Sequence[str], title: str) -> None:
    axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.grid(axis="x", color="#f0f0f0", linewidth=0.6)
    axes.set_axisbelow(True)


def draw_peak(axes: Any, document: Document, rows: Sequence[Row], key: str, unit: str) -> None:
    """The peak rate of the runs that the rows come from; a band if they differ."""
    values = [float(document.runs[index].peaks[key]) for index in sorted({row.run for row in rows})]
    middle = sum(values) / len(values)
    axes.axhline(middle, color=GREY, linestyle="--", linewidth=1)
    if max(values) > min(values):
        axes.axhspan(min(values), max(values), color=GREY, alpha=0.15, linewidth=0)
    axes.annotate(
        f"peak, {middle:.3g} {unit}" if middle < 10 else f"peak, {middle:.0f} {unit}",
        (0.005, middle),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=7.5,
        color=GREY,
    )
    axes.set_ylim(top=max(axes.get_ylim()[1], middle * 1.1))


def draw_legend(figure: Any, style: dict[str, tuple[str, str]], pyplot: Any) -> None:
    handles = [
        pyplot.Line2D([], [], linestyle="none", marker=marker, color=color, label=name)
        for name, (color, marker) in style.items()
    ]
    figure.legend(
        handles=handles, loc="upper right", ncols=min(len(handles), 4), frameon=False, fontsize=8.5
    )
