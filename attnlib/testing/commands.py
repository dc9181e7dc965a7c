"""The commands `attnlib verify`, `attnlib parity` and `attnlib replay`.

`attnlib.cli` calls the `*_main` functions. Each takes a list of arguments and returns the exit
code: 0 for a pass, 1 for a failure, 2 for invalid arguments, 3 for a backend that is unavailable.
"""

from __future__ import annotations

import argparse
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
"""Exit code for a backend whose package, compiler or device is not available; nothing was run."""

_BACKEND_HELP = "a registered name, module:Class or path/to/file.py:Class"


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"attnlib {name}", description=about)
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:1 (default: the GPU if available, else the CPU)"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the report as JSON to FILE or stdout",
    )
    return parser


def verify_parser() -> argparse.ArgumentParser:
    """The arguments of `attnlib verify`."""
    about = (
        "Run the conformance suite on a backend. Exit code: 0 if it passes, 1 if a case fails, 2 "
        "for invalid arguments, 3 if the backend is unavailable."
    )
    parser = _parser("verify", about)
    parser.add_argument("backend", help=_BACKEND_HELP)
    parser.add_argument(
        "--against",
        nargs="+",
        metavar="NAME",
        help="backends to exchange caches with (default: torch)",
    )
    parser.add_argument(
        "--only",
        metavar="CHECK[/CASE],...",
        help="run only these checks or cases; * and ? are wildcards",
    )
    parser.add_argument(
        "--score",
        metavar="MODULE:NAME",
        help="test the backend with this score function; module:name or path/to/file.py:name",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of all random numbers (default 0)"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="repeat with N consecutive seeds"
    )
    parser.add_argument("--quick", action="store_true", help="run the short form of each check")
    parser.add_argument(
        "--certify",
        choices=["batch-invariance"],
        help="instead of the suite, compare the bits of requests alone and in other batches; "
        "--json writes the certificate",
    )
    parser.add_argument("--commit", help="commit of attnlib in a certificate, without git history")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="number of worker processes (default: several on a GPU, one elsewhere)",
    )
    return parser


def _run_verify(args: argparse.Namespace) -> int:
    """Run `verify` and return its exit code; with several seeds, 0 only if all of them pass."""
    from attnlib.errors import AttnlibError, BackendUnavailableError
    from attnlib.testing.conformance import count_cases, make_target, run_conformance
    from attnlib.testing.outcome import CaseResult, Outcome
    from attnlib.testing.progress import ProgressBar
    from attnlib.testing.report import report_to_json

    if args.certify:
        return _run_certify(args)
    only = args.only or (None if args.score is None else "S1")
    passed, documents = True, []
    for seed in range(args.seed, args.seed + args.seeds):
        settings = {
            "device": args.device,
            "seed": seed,
            "quick": args.quick,
            "against": args.against,
            "score": args.score,
        }
        try:
            total = count_cases(make_target(args.backend, **settings), only)
            if total == 0:
                print(f"attnlib verify: no case matches --only {only}", file=sys.stderr)
                return 2
            bar = ProgressBar(total)

            def show(result: CaseResult, bar: ProgressBar = bar) -> None:
                bar.advance(result.id, result.outcome is Outcome.FAIL)

            report = run_conformance(
                args.backend, only=only, jobs=args.jobs, on_result=show, **settings
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


def _run_certify(args: argparse.Namespace) -> int:
    """Certify batch invariance: 0 if all bits are equal, 1 if not."""
    from attnlib.errors import AttnlibError, BackendUnavailableError
    from attnlib.testing.certificate import certify_batch_invariance

    try:
        certificate = certify_batch_invariance(
            args.backend,
            device=args.device,
            seed=args.seed,
            quick=args.quick,
            commit=args.commit,
            jobs=args.jobs,
            on_spec=lambda spec: print(f"compared: {spec.name}", file=sys.stderr, flush=True),
        )
    except (AttnlibError, ImportError, AttributeError) as error:
        print(f"attnlib verify: {error}", file=sys.stderr)
        return UNAVAILABLE if isinstance(error, BackendUnavailableError) else 2
    if args.json != "-":
        print(certificate)
    _write_json(args.json, certificate.to_json())
    return 0 if certificate.passed else 1


def parity_parser() -> argparse.ArgumentParser:
    """The arguments of `attnlib parity`."""
    about = "Compare backends with each other: one writes the cache, another one reads it."
    parser = _parser("parity", about)
    parser.add_argument(
        "backends", nargs="*", help=f"{_BACKEND_HELP} (default: all available backends)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of all random numbers (default 0)"
    )
    return parser


def _run_parity_command(args: argparse.Namespace) -> int:
    """Run `parity` and return its exit code."""
    from attnlib.errors import AttnlibError
    from attnlib.testing.parity import run_parity

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
    about = "Run a recorded call on a backend and compare the result with the oracle."
    parser = argparse.ArgumentParser(prog="attnlib replay", description=about)
    parser.add_argument("recording", help="a file written by shadow or save_recording")
    parser.add_argument("backend", help=_BACKEND_HELP)
    parser.add_argument("--device", default="cpu", help="device to run on (default: cpu)")
    parser.add_argument(
        "--shrink",
        metavar="FILE",
        help="reduce a failing recording and write the smallest batch that still fails to FILE",
    )
    return parser


def _run_replay(args: argparse.Namespace) -> int:
    """Run `replay`: 0 within the error budget, 1 above it, 2 for invalid arguments."""
    from attnlib.debug.record import load_recording, save_recording
    from attnlib.debug.replay import replay, shrink
    from attnlib.errors import AttnlibError
    from attnlib.testing.outcome import UnsupportedCase

    try:
        step = load_recording(args.recording, args.device)
        result = replay(step, args.backend)
    except (AttnlibError, ImportError, AttributeError, FileNotFoundError, UnsupportedCase) as error:
        print(f"attnlib replay: {error}", file=sys.stderr)
        return 2
    print(result)
    if not result.passed and args.shrink:
        smallest = shrink(step, lambda candidate: not replay(candidate, args.backend).passed)
        path = save_recording(smallest, args.shrink)
        print(f"smallest failing batch: {smallest.inputs.batch}, written to {path}")
    return 0 if result.passed else 1


def _write_json(target: str | None, text: str) -> None:
    if target == "-":
        print(text)
    elif target:
        Path(target).write_text(text + "\n", encoding="utf-8")


def verify_main(argv: Sequence[str] | None = None) -> int:
    """Run `attnlib verify`; returns the exit code."""
    return _run_verify(verify_parser().parse_args(argv))


def parity_main(argv: Sequence[str] | None = None) -> int:
    """Run `attnlib parity`; returns the exit code."""
    return _run_parity_command(parity_parser().parse_args(argv))


def replay_main(argv: Sequence[str] | None = None) -> int:
    """Run `attnlib replay`; returns the exit code."""
    return _run_replay(replay_parser().parse_args(argv))
