"""The kit on the command line: `attnlib verify`, `attnlib parity`, `attnlib replay`.

`attnlib.cli` hands over to the `*_main` functions; each takes a list of arguments and returns the exit code: 0 for a
pass, 1 for a failure, 2 for arguments that name nothing, 3 for a backend that cannot run here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "parity_main",
    "parity_parser",
    "replay_main",
    "replay_parser",
    "verify_main",
    "verify_parser",
]

UNAVAILABLE = 3
"""Exit code for a backend whose package, compiler or device is missing here: nothing was examined."""

_PATH_HELP = "a registered name, module:Class, or path/to/file.py:Class"


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"attnlib {name}", description=about)
    made.add_argument(
        "--device", help="cpu, cuda, cuda:1; default: a GPU where torch sees one, else the CPU"
    )
    made.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to stdout"
    )
    return made


def verify_parser() -> argparse.ArgumentParser:
    """The arguments of `attnlib verify`."""
    about = "Examine a backend: does it compute what the contract says? Exit code 0 when it passes, 1 when it fails, 3 when it cannot run here."
    made = _parser("verify", about)
    made.add_argument("backend", help=_PATH_HELP)
    made.add_argument(
        "--against",
        nargs="+",
        metavar="NAME",
        help="backends to exchange caches with (default: torch)",
    )
    made.add_argument(
        "--only", metavar="PROBE[/CASE],...", help="run these probes or cases only; * and ? match"
    )
    made.add_argument("--seed", type=int, default=0, help="of every random number (default 0)")
    made.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="repeat with N seeds in a row from --seed"
    )
    made.add_argument("--quick", action="store_true", help="the short form of each probe")
    made.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes to run the cases in (default: several on a GPU, one elsewhere)",
    )
    return made


def _run_verify(args: argparse.Namespace) -> int:
    """Run `verify`: 0 when every seed passed, 1 when one failed, 2 for bad arguments, 3 for a backend that cannot run here."""
    from attnlib.errors import AttnlibError, BackendUnavailableError
    from attnlib.testing.conformance import count_cases, make_target, run_conformance
    from attnlib.testing.outcome import CaseResult, Outcome
    from attnlib.testing.progress import ProgressBar
    from attnlib.testing.report import report_to_json

    _find_modules_here(args.backend)
    passed, documents = True, []
    for seed in range(args.seed, args.seed + args.seeds):
        chosen = {"device": args.device, "seed": seed, "quick": args.quick, "against": args.against}
        try:
            total = count_cases(make_target(args.backend, **chosen), args.only)
            if total == 0:
                print(f"attnlib verify: nothing matches --only {args.only}", file=sys.stderr)
                return 2
            bar = ProgressBar(total)

            def show(result: CaseResult, bar: ProgressBar = bar) -> None:
                bar.advance(result.id, result.outcome is Outcome.FAIL)

            report = run_conformance(
                args.backend, only=args.only, jobs=args.jobs, on_result=show, **chosen
            )
        except (AttnlibError, ImportError, AttributeError) as error:
            print(f"attnlib verify: {error}", file=sys.stderr)
            return UNAVAILABLE if isinstance(error, BackendUnavailableError) else 2
        bar.close()
        documents.append(report_to_json(report))
        passed = passed and report.passed
        if args.json != "-":
            print(report)
    text = documents[0] if len(documents) == 1 else f"[{','.join(documents)}]"
    _write_json(args.json, text)
    return 0 if passed else 1


def parity_parser() -> argparse.ArgumentParser:
    """The arguments of `attnlib parity`."""
    about = (
        "Compare all installed backends with each other: one writes the cache, another reads it."
    )
    made = _parser("parity", about)
    made.add_argument(
        "backends", nargs="*", help=f"{_PATH_HELP}; default: everything that runs here"
    )
    made.add_argument("--seed", type=int, default=0, help="of every random number (default 0)")
    return made


def _run_parity_command(args: argparse.Namespace) -> int:
    """Run `parity`: 0 when no cell failed, 1 when one did, 2 for bad arguments."""
    from attnlib.errors import AttnlibError
    from attnlib.testing.parity import run_parity

    for backend in args.backends:
        _find_modules_here(backend)
    try:
        report = run_parity(args.backends or None, device=args.device, seed=args.seed)
    except (AttnlibError, ImportError, AttributeError) as error:
        print(f"attnlib parity: {error}", file=sys.stderr)
        return 2
    if args.json != "-":
        print(report)
    _write_json(args.json, report.to_json())
    return 0 if report.passed else 1


def replay_parser() -> argparse.ArgumentParser:
    """The arguments of `attnlib replay`."""
    about = "Run a recorded call on a backend and hold the result against the oracle."
    made = argparse.ArgumentParser(prog="attnlib replay", description=about)
    made.add_argument("recording", help="a file written by shadow or save_recording")
    made.add_argument("backend", help=_PATH_HELP)
    made.add_argument("--device", default="cpu", help="where to run it (default cpu)")
    made.add_argument(
        "--shrink", metavar="FILE", help="write the smallest part that still fails to FILE"
    )
    return made


def _run_replay(args: argparse.Namespace) -> int:
    """Run `replay`: 0 within budget, 1 over budget, 2 for bad arguments."""
    from attnlib.debug.record import load_recording, save_recording
    from attnlib.debug.replay import replay, shrink
    from attnlib.errors import AttnlibError
    from attnlib.testing.outcome import UnsupportedCase

    _find_modules_here(args.backend)
    try:
        step = load_recording(args.recording, args.device)
        result = replay(step, args.backend)
    except (AttnlibError, ImportError, AttributeError, FileNotFoundError, UnsupportedCase) as error:
        print(f"attnlib replay: {error}", file=sys.stderr)
        return 2
    print(result)
    if not result.passed and args.shrink:
        smallest = shrink(step, lambda part: not replay(part, args.backend).passed)
        path = save_recording(smallest, args.shrink)
        print(f"smallest failing part: {smallest.inputs.batch}, written to {path}")
    return 0 if result.passed else 1


def _find_modules_here(backend: str) -> None:
    """module:Class is looked for in the working directory too, as `python -m` does."""
    if ":" in backend and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _write_json(target: str | None, text: str) -> None:
    if target == "-":
        print(text)
    elif target:
        Path(target).write_text(text + "\n", encoding="utf-8")


def verify_main(argv: Sequence[str] | None = None) -> int:
    """`attnlib verify`."""
    return _run_verify(verify_parser().parse_args(argv))


def parity_main(argv: Sequence[str] | None = None) -> int:
    """`attnlib parity`."""
    return _run_parity_command(parity_parser().parse_args(argv))


def replay_main(argv: Sequence[str] | None = None) -> int:
    """`attnlib replay`."""
    return _run_replay(replay_parser().parse_args(argv))
