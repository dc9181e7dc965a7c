"""The arguments of `attnlib bench`."""

from __future__ import annotations

import argparse

from attnlib.bench.backends import split_names
from attnlib.bench.suites import SUITES
from attnlib.cli.arguments import (
    CommandParser,
    add_device_flag,
    count,
    input_file,
    input_path,
    output_file,
    output_folder,
    seconds,
)

__all__ = ["backend_names", "parser"]


def backend_names(text: str) -> list[str]:
    """Requests of backends, separated by commas."""
    names = split_names(text)
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no backend")
    return names


def _part(text: str) -> slice:
    first, _, step = text.partition("/")
    return slice(int(first), None, int(step))


def parser() -> CommandParser:
    """The arguments of `attnlib bench`."""
    made = CommandParser(
        prog="attnlib bench",
        description="Compare backends on the same tensors, after a correctness check. Exit status "
        "1 if a backend is wrong or fails, 2 for invalid arguments.",
        epilog="A CASE is a name, a glob over names, or BATCH[@KEY=VALUE,...] such as "
        "32q1s4k@heads=64/8,d=64,window=128,sinks.",
    )
    _add_cases(made)
    _add_measuring(made)
    _add_results(made)
    return made


def _add_cases(made: CommandParser) -> None:
    """What is measured."""
    made.add_argument(
        "cases", nargs="*", metavar="CASE", help="what to measure (default: the suite)"
    )
    made.add_argument(
        "--suite",
        choices=tuple(SUITES),
        help="named cases, which --list prints (default: anchors, the published rows, on a GPU; "
        "cpu elsewhere)",
    )
    made.add_argument(
        "--backends",
        type=backend_names,
        metavar="NAME,...",
        help="requests as in ATTNLIB_BACKEND, or NAME[KEY=VALUE;...] (default: all that can run "
        "here)",
    )
    made.add_argument(
        "--block-size",
        type=count,
        metavar="N",
        help="block size of every case (default: that of each case)",
    )
    made.add_argument(
        "--workloads",
        type=input_path,
        metavar="PATH",
        help="measure the attention workloads of a FlashInfer-Bench trace set: its root folder, or "
        "one of its JSONL files. CASE is then a glob over DEFINITION/ID",
    )
    made.add_argument(
        "--solutions",
        type=output_folder,
        metavar="DIR",
        help="with --workloads: measure nothing, and write a solution file for FlashInfer-Bench "
        "for each definition",
    )
    made.add_argument("--list", action="store_true", help="print the cases and exit")


def _add_measuring(made: CommandParser) -> None:
    """How it is measured."""
    add_device_flag(made)
    made.add_argument(
        "--eager", action="store_true", help="time eager calls instead of CUDA graphs"
    )
    made.add_argument(
        "--no-check",
        action="store_true",
        help="time without the correctness check; rows are marked",
    )
    made.add_argument(
        "--kernels-only",
        action="store_true",
        help="leave out eager calls, cache writes and host times, for more rows in less time",
    )
    made.add_argument(
        "--limit-seconds",
        type=seconds,
        metavar="S",
        help="start no case after S seconds; the others are listed as not run",
    )
    made.add_argument(
        "--compile-jobs",
        type=count,
        metavar="N",
        help="call every case once in N processes first, which fills the caches of kernels",
    )
    made.add_argument("--part", type=_part, help=argparse.SUPPRESS)  # a process of --compile-jobs


def _add_results(made: CommandParser) -> None:
    """Where results go, and results of earlier runs."""
    made.add_argument(
        "--json", type=output_file, metavar="FILE", help="write results to FILE after each case"
    )
    made.add_argument(
        "--figures",
        type=output_folder,
        metavar="DIR",
        help="write SVG and PNG figures to DIR (needs matplotlib)",
    )
    made.add_argument(
        "--from-json",
        nargs="+",
        type=input_file,
        metavar="FILE",
        help="measure nothing: print, merge (--json) or plot (--figures) the results in FILEs",
    )
    made.add_argument("--commit", help="attnlib's commit; needed outside a git clone")
