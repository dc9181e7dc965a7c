"""Figures depend on the document only. The numbers here are invented, and the figures say so."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from attnlib.bench.case import BenchCase
from attnlib.bench.results import Document, Row, Run
from attnlib.bench.suites import SUITES
from attnlib.bench.work import flops, kv_bytes, roofline_us

pytest.importorskip("matplotlib", reason="pip install 'attnlib[bench]'")

PEAKS = {
    "copy_gbps": 4275.0,
    "read_gbps": 4268.0,
    "matmul_tflops": 675.0,
    "matmul": "bfloat16 8192^3 matrix product",
}


def invented() -> Document:
    """Every anchor with three backends at invented speeds."""
    draw = random.Random(0)
    rows = [
        _row(case, name, draw)
        for case in SUITES["anchors"]
        for name in ("triton", "flash_attn", "flashinfer")
    ]
    run = Run(
        {
            "gpu": "INVENTED TEST DATA",
            "torch": "0",
            "triton": "0",
            "commit": "none",
            "date": "never",
        },
        PEAKS,
    )
    return Document((run,), tuple(rows))


def _row(case: BenchCase, backend: str, draw: random.Random) -> Row:
    us = roofline_us(case, 4268, 675) / draw.uniform(0.6, 0.95) + draw.uniform(3, 6)
    base = Row(
        case=case.name,
        kind=case.kind,
        batch=str(case.batch),
        shape=case.shape,
        settings=case.to_json(),
        backend=backend,
        status="ok",
        how="graph",
    )
    return replace(base, us=us, gbps=kv_bytes(case) / us / 1e3, tflops=flops(case) / us / 1e6)


@pytest.mark.slow
def test_three_figures_in_two_formats(tmp_path: Path) -> None:
    from attnlib.bench.figures import draw_figures

    written = draw_figures(invented(), tmp_path)
    assert sorted(path.name for path in written) == [
        f"{name}.{kind}" for name in ("decode", "prefill", "ratio") for kind in ("png", "svg")
    ]
    for path in written:
        if path.suffix == ".svg":
            ElementTree.parse(path)
        else:
            assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    decodes = tuple(row for row in invented().rows if row.kind == "decode")
    again = draw_figures(Document(invented().runs, decodes), tmp_path / "again")
    assert again[0].name == written[0].name == "decode.svg"
    assert again[0].read_bytes() == written[0].read_bytes(), "equal rows give equal files"


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    from attnlib.bench.figures import draw_figures

    whole = invented()
    ours = Document(
        whole.runs,
        tuple(row for row in whole.rows if row.backend == "triton" and row.kind == "decode"),
    )
    assert [path.name for path in draw_figures(ours, tmp_path)] == ["decode.svg", "decode.png"]
    assert draw_figures(Document(whole.runs, ()), tmp_path) == []


def test_points_and_bars_have_the_values_of_the_rows(tmp_path: Path) -> None:
    """Markers show rates, bars show ratios."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from attnlib.bench import figures

    document = invented()
    decode = figures._decode(document, pyplot)
    drawn = {
        line.get_label(): sorted(line.get_ydata())
        for line in decode.axes[0].lines
        if not line.get_label().startswith("_")
    }
    assert drawn == {
        name: sorted(
            row.gbps for row in document.rows if row.backend == name and row.kind == "decode"
        )
        for name in drawn
    }
    assert set(drawn) == {"triton", "flash_attn", "flashinfer"}
    prefill = figures._prefill(document, pyplot)
    assert [axes.get_title(loc="left") for axes in prefill.axes] == [
        "Prefill, page 16",
        "Prefill, page 128",
    ]
    bars = figures._ratio(document, pyplot)
    widths = [patch.get_width() for patch in bars.axes[0].patches]
    by_case = {
        case.name: {row.backend: row.us for row in document.rows if row.case == case.name}
        for case in SUITES["anchors"]
    }
    assert widths == [
        us["triton"] / min(us["flash_attn"], us["flashinfer"]) for us in by_case.values()
    ]
    pyplot.close("all")
