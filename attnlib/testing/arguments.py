"""The arguments of `attnlib verify`, `attnlib parity` and `attnlib replay`."""

from __future__ import annotations

from collections.abc import Callable

from attnlib.cli.arguments import (
    REQUEST_HELP,
    CommandParser,
    count,
    input_file,
    known_device,
    output_file,
    present_device,
    seconds,
    seed,
    workers,
)

__all__ = ["parity_parser", "replay_parser", "verify_parser"]


def _parser(name: str, about: str, device: Callable[[str], str]) -> CommandParser:
    made = CommandParser(prog=f"attnlib {name}", description=about)
    made.add_argument(
        "--device",
        type=device,
        help="cpu, cuda or cuda:1 (default: the GPU if available, else the CPU)",
    )
    made.add_argument(
        "--json",
        nargs="?",
        const="-",
        type=output_file,
        metavar="FILE",
        help="write the report as JSON to FILE or stdout",
    )
    made.add_argument("--seed", type=seed, default=0, help="seed of all random numbers (default 0)")
    return made


def verify_parser() -> CommandParser:
    """The arguments of `attnlib verify`."""
    about = (
        "Run the conformance suite on a backend. Exit code: 0 if it passes, 1 if a case fails, 2 "
        "for invalid arguments, 3 if the backend is unavailable."
    )
    made = _parser("verify", about, known_device)
    made.add_argument("backend", nargs="?", help=REQUEST_HELP)
    made.add_argument(
        "--kv-format",
        metavar="NAME",
        help="test a KV format over the backend (default: torch); a name, module:OBJECT or "
        "path/to/file.py:OBJECT",
    )
    made.add_argument(
        "--against",
        nargs="+",
        metavar="NAME",
        help="backends to exchange caches with (default: torch)",
    )
    made.add_argument(
        "--only",
        metavar="CHECK[/CASE],...",
        help="run only these checks or cases, or certify only these kinds of layers; * and ? are "
        "wildcards",
    )
    made.add_argument(
        "--score",
        metavar="MODULE:NAME",
        help="test the backend with this score function; module:name or path/to/file.py:name",
    )
    made.add_argument(
        "--seeds", type=count, default=1, metavar="N", help="repeat with N consecutive seeds"
    )
    made.add_argument("--quick", action="store_true", help="run the short form of each check")
    made.add_argument(
        "--certify",
        choices=["batch-invariance"],
        help="instead of the suite, compare the bits of requests alone and in other batches; "
        "--json writes the certificate",
    )
    made.add_argument(
        "--limit-seconds",
        type=seconds,
        metavar="S",
        help="with --certify: begin no kind of layer after S seconds; the others are not run",
    )
    made.add_argument(
        "--commit", help="with --certify: attnlib's commit; needed outside a git clone"
    )
    made.add_argument(
        "--jobs",
        type=workers,
        metavar="N",
        help="number of worker processes (default: several on a GPU, one elsewhere)",
    )
    return made


def parity_parser() -> CommandParser:
    """The arguments of `attnlib parity`."""
    about = "Compare backends with each other: one writes the cache, another one reads it."
    made = _parser("parity", about, present_device)
    made.add_argument(
        "backends", nargs="*", help=f"{REQUEST_HELP} (default: all available backends)"
    )
    made.add_argument(
        "--only", metavar="CALL,...", help="run only these calls; * and ? are wildcards"
    )
    return made


def replay_parser() -> CommandParser:
    """The arguments of `attnlib replay`."""
    about = "Run a recorded call on a backend and compare the result with a reference in float64."
    made = CommandParser(prog="attnlib replay", description=about)
    made.add_argument(
        "recording",
        type=input_file,
        help="a file that ATTNLIB_VALIDATE=2, attnlib.debug.record or attnlib.debug.shadow wrote",
    )
    made.add_argument("backend", help=REQUEST_HELP)
    made.add_argument(
        "--device", type=present_device, default="cpu", help="device to run on (default: cpu)"
    )
    made.add_argument(
        "--shrink",
        type=output_file,
        metavar="FILE",
        help="reduce a failing recording and write the smallest batch that still fails to FILE",
    )
    return made
