"""The generated tables of docs/performance.md, from result files of `attnlib bench --json`.

A marker in the page names the result files of one table, of a list with one line for each file, or
of a line with their versions:

    <!-- results: h200/bench.json h100/bench.json -->   ...   <!-- end of results -->
    <!-- records: h200/cudnn.json -->   ...   <!-- end of results -->
    <!-- versions: h200/bench.json h100/bench.json -->   ...   <!-- end of results -->
"""

from __future__ import annotations

import fnmatch
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from attnlib.bench.results import Row, Run, ratio, read_document
from attnlib.bench.table import kernel_lines

__all__ = ["MARKED", "fill", "records", "table", "versions"]

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results"
MARKED = re.compile(
    r"(?<=<!-- )(?P<kind>results|records|versions): (?P<names>[^>]+?) -->\n"
    r".*?(?=<!-- end of results -->)",
    re.S,
)


def fill(page: str, folder: Path = FOLDER) -> str:
    """The page with the tables of its markers."""

    def replace(match: re.Match[str]) -> str:
        make = {"results": table, "records": records, "versions": versions}[match["kind"]]
        text = make(match["names"].split(), folder)
        return f"{match['kind']}: {match['names']} -->\n\n{text}\n"

    return MARKED.sub(replace, page)


def table(names: Sequence[str], folder: Path = FOLDER) -> str:
    """One line for each case and three columns for each chip, then the files by chip.

    Args:
        names: result files `CHIP/NAME.json`, and patterns of cases, without a slash; all cases
            without patterns.
        folder: the folder with the folders of chips.
    """
    files = [name for name in names if "/" in name]
    patterns = [name for name in names if "/" not in name] or ["*"]
    chips = list(dict.fromkeys(name.split("/")[0] for name in files))
    found: dict[str, dict[str, str]] = {}
    sources: dict[str, list[str]] = {}
    for file in files:
        document = read_document(folder / file)
        chip = file.split("/")[0]
        for row in document.rows:
            if row.backend == "triton" and any(fnmatch.fnmatch(row.case, p) for p in patterns):
                found.setdefault(row.case, {})[chip] = _cells(document.rows, row)
        for run in document.runs:
            sources.setdefault(run.provenance["gpu"], []).append(_source(file, run))
    head = "".join(f" | {chip.upper()} us | of peak | vs best" for chip in chips)
    lines = [f"| case{head} |", "|---|" + "---:|" * (3 * len(chips))]
    for case, cells in found.items():
        lines.append(f"| `{case}` | " + " | ".join(cells.get(c, " |  | ") for c in chips) + " |")
    made = [f"- {gpu}: {'; '.join(texts)}" for gpu, texts in sources.items()]
    return "\n".join([*lines, "", *made]) + "\n"


def _cells(rows: Sequence[Row], row: Row) -> str:
    """Time, share of the peak and ratio to the best other backend."""
    to_best = ratio(rows, row)
    time = "" if row.us is None else f"{row.us:.1f}" if row.us < 1000 else f"{row.us:.0f}"
    return " | ".join(
        [
            time,
            "" if row.share is None else f"{row.share:.0%}",
            "" if to_best is None else f"{to_best:.2f}",
        ]
    )


def versions(files: Sequence[str], folder: Path = FOLDER) -> str:
    """The versions of all runs in one line, and which kernels a backend ran."""
    made: dict[str, None] = {}
    kernels: dict[str, None] = {}
    for file in files:
        document = read_document(folder / file)
        kernels |= dict.fromkeys(kernel_lines(document.rows))
        for run in document.runs:
            facts = [f"{name} {run.provenance[name]}" for name in ("torch", "triton", "driver")]
            made[", ".join(facts)] = None
    return f"Versions: {'; '.join([' or '.join(made), *kernels])}.\n"


def _source(file: str, run: Run) -> str:
    """A link to the file, which has the command and the date, with commit and peak rates."""
    facts, peaks = run.provenance, run.peaks
    return (
        f"[{file}](../benchmarks/results/{file}) at {facts['commit']}, "
        f"peak {peaks['read_gbps']:.0f} GB/s and {peaks['matmul_tflops']:.0f} TFLOP/s"
    )


def records(files: Sequence[str], folder: Path = FOLDER) -> str:
    """One line for each result file: cases, other backends, and the ratios to the best of them."""
    lines = [
        "| record | cases | other backends | vs best: least | median | most |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for file in files:
        document = read_document(folder / file)
        ours = [row for row in document.rows if row.backend == "triton" and row.us]
        ratios = [found for row in ours if (found := ratio(document.rows, row)) is not None]
        others = dict.fromkeys(row.backend for row in document.rows if row.backend != "triton")
        names = ", ".join(f"`{name.split(':')[-1]}`" for name in others)
        shown = [min(ratios), statistics.median(ratios), max(ratios)]
        cells = " | ".join(f"{value:.2f}" for value in shown)
        link = f"[{file}](../benchmarks/results/{file})"
        lines.append(f"| {link} | {len(ours)} | {names} | {cells} |")
    return "\n".join(lines) + "\n"
