"""Rows of a benchmark script: chosen by name, limited in time, and written one by one."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from attnlib.bench.provenance import provenance
from attnlib.errors import ContractError

__all__ = ["choose", "parser", "run"]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that the scripts share, named as those of `attnlib bench`."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("rows", nargs="*", metavar="ROW", help="names or globs (default: all rows)")
    made.add_argument("--list", action="store_true", help="print the rows and exit")
    made.add_argument(
        "--limit-seconds", type=float, metavar="S", default=float("inf"),
        help="start no row after S seconds; the others are listed as not run",
    )  # fmt: skip
    made.add_argument("--out", type=Path, help="JSON file of the results")
    made.add_argument("--commit", help="commit of attnlib, for copies without history")
    return made


def choose(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match a pattern, in the order of the patterns; all names without patterns.

    Raises:
        ContractError: a pattern that matches no name.
    """
    pool = list(names)
    chosen: list[str] = []
    for pattern in patterns or ["*"]:
        found = [name for name in pool if fnmatchcase(name, pattern)]
        if not found:
            raise ContractError(f"no row matches {pattern!r}: --list shows the {len(pool)} names")
        chosen += found
    return list(dict.fromkeys(chosen))


def run(
    options: argparse.Namespace,
    names: Iterable[str],
    measure: Callable[[str], dict[str, Any]],
    processes: int = 1,
) -> int:
    """Measure the chosen rows, and write the file after each; returns the exit status.

    Args:
        options: arguments of `parser`.
        names: all rows, the most important ones first.
        measure: the result of a row. An exception becomes the result of its row.
        processes: rows that run at the same time, for checks that are not timed. Each process
            compiles the kernels of its rows; `measure` must be a function of a module.
    """
    began = time.monotonic()
    chosen = choose(names, options.rows)
    if options.list:
        print("\n".join(chosen))
        return 0
    document: dict[str, Any] = {"provenance": provenance(commit=options.commit), "rows": []}
    end = began + options.limit_seconds
    if processes > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, context) as pool:
            for row in pool.map(_measure, chosen, [measure] * len(chosen), [end] * len(chosen)):
                _write(document, row, options.out)
    else:
        for name in chosen:
            _write(document, _measure(name, measure, end), options.out)
    return int(any("error" in row for row in document["rows"]))


def _measure(name: str, measure: Callable[[str], dict[str, Any]], end: float) -> dict[str, Any]:
    """One row. `end` is a time of the monotonic clock, which all processes share."""
    if time.monotonic() > end:
        return {"row": name, "error": "not run: no time"}
    try:
        return {"row": name, **measure(name)}
    except Exception as error:
        return {"row": name, "error": f"{type(error).__name__}: {error}"[:300]}


def _write(document: dict[str, Any], row: dict[str, Any], out: Path | None) -> None:
    document["rows"].append(row)
    print(json.dumps(row), flush=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
