"""Switch off one check after another, and list the wrong backends that then pass.

    python -m tests.testing.redundancy [--full] [ERROR ...]

Checks do not affect each other, so that one run of each wrong backend gives the result of all
reduced suites: without a check, a backend passes if no other check fails. The script prints the
failed checks of each wrong backend and exits with 1 if one is detected by a single check, or none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from attnlib.testing.check import run_check_case, select_cases
from attnlib.testing.checks import CHECKS
from attnlib.testing.conformance import make_target
from attnlib.testing.outcome import Outcome
from tests.testing.toy_backend import ToyBackend
from tests.testing.wrong_backends import WRONG
from tests.testing.wrong_states import WRONG_STATES

__all__ = ["ERRORS", "failed_checks", "undetected_without"]

ERRORS = {**WRONG, **WRONG_STATES}
"""Error -> (backend, check meant to detect it)."""


def failed_checks(error: str, *, quick: bool = True, most: int | None = None) -> tuple[str, ...]:
    """Ids of the checks that a wrong backend fails, sorted.

    Args:
        error: a key of `ERRORS`.
        quick: run the short form of each check.
        most: stop after this number of failed checks; the one meant to detect the error is first.
    """
    backend, meant = ERRORS[error]
    against = [] if error in WRONG_STATES else [ToyBackend]
    target = make_target(backend, device="cpu", against=against, quick=quick)
    failed: list[str] = []
    for check in sorted(CHECKS, key=lambda check: check.id != meant):
        if check.kind not in target.kinds:
            continue
        results = (run_check_case(check, case, target) for case in select_cases(check, target))
        if any(result.outcome is Outcome.FAIL for result in results):
            failed.append(check.id)
        if len(failed) == most:
            break
    return tuple(sorted(failed))


def undetected_without(detected: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Check -> the errors that no other check detects.

    Args:
        detected: error -> the checks that fail.
    """
    return {
        check.id: [error for error, failed in detected.items() if set(failed) <= {check.id}]
        for check in CHECKS
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the failed checks of each wrong backend and the errors that one check detects."""
    parser = argparse.ArgumentParser(prog="redundancy", description=__doc__)
    parser.add_argument("errors", nargs="*", help="errors of ERRORS (default: all)")
    parser.add_argument("--full", action="store_true", help="run the full form of each check")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    detected = {}
    for error in args.errors or ERRORS:
        detected[error] = failed_checks(error, quick=not args.full)
        print(f"{error}: {', '.join(detected[error]) or 'NOT DETECTED'}", flush=True)
    alone = undetected_without(detected)
    for check, errors in alone.items():
        for error in errors:
            print(f"without {check}: {error!r} passes")
    return 1 if any(alone.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
