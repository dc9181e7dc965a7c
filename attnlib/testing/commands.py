"""The commands `attnlib verify`, `attnlib parity` and `attnlib replay`.

`attnlib.cli` calls the `*_main` functions. Each takes a list of arguments and returns the exit
code: 0 for a pass, 1 for a failure, 2 for invalid arguments, 3 for a backend that is unavailable.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from attnlib.cli.arguments import write_text
from attnlib.testing.arguments import parity_parser, replay_parser, verify_parser

if TYPE_CHECKING:
    from attnlib.debug.state_calls import RecordedStateCall
    from attnlib.testing.conformance import ConformanceReport

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


def _run_verify(args: argparse.Namespace) -> int:
    """Run `verify` and return its exit code; with several seeds, 0 only if all of them pass."""
    from attnlib.errors import AttnlibError, BackendUnavailableError

    try:
        _check_combination(args)
        return _run_certify(args) if args.certify else _run_suite(args)
    except AttnlibError as error:
        print(f"attnlib verify: {error}", file=sys.stderr)
        return UNAVAILABLE if isinstance(error, BackendUnavailableError) else 2


def _check_combination(args: argparse.Namespace) -> None:
    """Refuse options that the chosen form of the command would ignore."""
    from attnlib.errors import ContractError

    if args.backend is None:
        if args.kv_format is None:
            raise ContractError("name a backend, or a KV format with --kv-format")
        args.backend = "torch"
    if args.kv_format is not None and args.score is not None:
        raise ContractError("--kv-format and --score test different things: give one of them")
    suite_only = {
        "--score": args.score,
        "--kv-format": args.kv_format,
        "--against": args.against,
        "--seeds": args.seeds != 1,
    }
    given = [flag for flag, value in suite_only.items() if value]
    if args.certify and given:
        raise ContractError(f"--certify runs no suite: leave out {', '.join(given)}")
    for flag, value in (("--commit", args.commit), ("--limit-seconds", args.limit_seconds)):
        if value is not None and not args.certify:
            raise ContractError(f"{flag} is for a certificate: give --certify, too")


def _run_suite(args: argparse.Namespace) -> int:
    """The suite with each seed: 0 if all cases pass, 1 if not."""
    from attnlib.testing.report import report_to_json
    from attnlib.testing.score_functions import load_score_function

    settings = {"device": args.device, "quick": args.quick, "against": args.against}
    settings |= {"score": args.score, "kv_format": args.kv_format}
    if args.score is not None:
        load_score_function(args.score)  # a wrong path is refused before anything is run
    reports = []
    for seed in range(args.seed, args.seed + args.seeds):
        reports.append(_run_seed(args, {**settings, "seed": seed}))
        if args.json != "-":
            print(reports[-1])
    documents = [report_to_json(report) for report in reports]
    _write_json(args.json, documents[0] if len(documents) == 1 else f"[{','.join(documents)}]")
    return 0 if all(report.passed for report in reports) else 1


def _run_seed(args: argparse.Namespace, settings: dict[str, Any]) -> ConformanceReport:
    """The suite with one seed, with a progress bar."""
    from attnlib.testing.check import check_filter
    from attnlib.testing.conformance import checks_of, count_cases, make_target, run_conformance
    from attnlib.testing.outcome import CaseResult, Outcome
    from attnlib.testing.progress import ProgressBar

    only = args.only if args.only is not None else (None if args.score is None else "S1")
    target = make_target(args.backend, **settings)
    check_filter(checks_of(target), target, only)
    bar = ProgressBar(count_cases(target, only))

    def show(result: CaseResult) -> None:
        bar.advance(result.id, result.outcome is Outcome.FAIL)

    try:
        return run_conformance(args.backend, only=only, jobs=args.jobs, on_result=show, **settings)
    finally:
        bar.close()


def _run_certify(args: argparse.Namespace) -> int:
    """Certify batch invariance: 0 if all bits are equal, 1 if not."""
    from attnlib.testing.certificate import certify_batch_invariance

    certificate = certify_batch_invariance(
        args.backend,
        device=args.device,
        seed=args.seed,
        quick=args.quick,
        commit=args.commit,
        jobs=args.jobs,
        only=args.only,
        limit_seconds=math.inf if args.limit_seconds is None else args.limit_seconds,
        on_spec=lambda spec: print(spec, file=sys.stderr, flush=True),
    )
    if args.json != "-":
        print(certificate)
    _write_json(args.json, certificate.to_json())
    return 0 if certificate.passed else 1


def _run_parity_command(args: argparse.Namespace) -> int:
    """Run `parity` and return its exit code."""
    from attnlib.errors import AttnlibError, BackendUnavailableError
    from attnlib.testing.parity import run_parity

    try:
        report = run_parity(
            args.backends or None, device=args.device, seed=args.seed, only=args.only
        )
    except AttnlibError as error:
        print(f"attnlib parity: {error}", file=sys.stderr)
        return UNAVAILABLE if isinstance(error, BackendUnavailableError) else 2
    if args.json != "-":
        print(report)
    _write_json(args.json, report.to_json())
    return 0 if report.passed else 1


def _run_replay(args: argparse.Namespace) -> int:
    """Run `replay`: 0 within the error budget, 1 above it, 2 or 3 as all commands."""
    from attnlib.debug.record import load_recording, save_recording
    from attnlib.debug.replay import replay, replay_state, shrink
    from attnlib.debug.state_calls import is_state_recording, load_state_recording
    from attnlib.errors import AttnlibError, BackendUnavailableError
    from attnlib.testing.backend_under_test import load_backend, refuse_unavailable
    from attnlib.testing.outcome import UnsupportedCase

    try:
        refuse_unavailable(load_backend(args.backend), torch.device(args.device))
        if is_state_recording(args.recording):
            call = load_state_recording(args.recording, args.device)
            result = replay_state(call, args.backend)
            print(result)
            if not result.passed and args.shrink:
                _write_smallest(call, args)
            return 0 if result.passed else 1
        step = load_recording(args.recording, args.device)
        result = replay(step, args.backend)
    except (AttnlibError, UnsupportedCase) as error:
        print(f"attnlib replay: {error}", file=sys.stderr)
        return UNAVAILABLE if isinstance(error, BackendUnavailableError) else 2
    print(result)
    if not result.passed and args.shrink:
        smallest = shrink(step, lambda candidate: not replay(candidate, args.backend).passed)
        path = save_recording(smallest, args.shrink)
        print(f"smallest failing batch: {smallest.inputs.batch}, written to {path}")
    return 0 if result.passed else 1


def _write_smallest(call: RecordedStateCall, args: argparse.Namespace) -> None:
    from attnlib.debug.replay import replay_state, shrink_state
    from attnlib.debug.state_calls import save_state_recording

    smallest = shrink_state(call, lambda part: not replay_state(part, args.backend).passed)
    path = save_state_recording(smallest, args.shrink)
    print(f"smallest failing batch: {smallest}, written to {path}")


def _write_json(target: str | None, text: str) -> None:
    if target == "-":
        print(text)
    elif target:
        write_text(target, text)


def verify_main(argv: Sequence[str] | None = None) -> int:
    """Run `attnlib verify`; returns the exit code."""
    return _run_verify(verify_parser().parse_args(argv))


def parity_main(argv: Sequence[str] | None = None) -> int:
    """Run `attnlib parity`; returns the exit code."""
    return _run_parity_command(parity_parser().parse_args(argv))


def replay_main(argv: Sequence[str] | None = None) -> int:
    """Run `attnlib replay`; returns the exit code."""
    return _run_replay(replay_parser().parse_args(argv))
