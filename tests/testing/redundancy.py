"""Switch off one check after another, and list the wrong backends that then pass.

    python -m tests.testing.redundancy [--full] [ERROR ...]
    python -m tests.testing.redundancy --record

Checks do not affect each other, so that one run of each wrong backend gives the result of all
reduced suites: without a check, a backend passes if no other check fails. The script prints the
failed checks of each wrong backend and exits with 1 if one is detected by a single check, or none.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from string import digits

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
FILE = Path(__file__).with_name("noticed_by.json")
RECORDED: dict[str, list[list[str]]] = json.loads(FILE.read_text())
"""Error -> two cases that notice it, [check, case]: where to look first. A case that no longer
notices its error costs time and nothing else; `--record` writes the file again."""


def failed_checks(error: str, *, quick: bool = True, most: int | None = None) -> tuple[str, ...]:
    """Ids of the checks that a wrong backend fails, sorted.

    Args:
        error: a key of `ERRORS`.
        quick: run the short form of each check.
        most: stop after this number of failed checks.
    """
    return tuple(sorted(failed_cases(error, quick=quick, most=most)))


def failed_cases(error: str, *, quick: bool = True, most: int | None = None) -> dict[str, str]:
    """Check -> its first case that a wrong backend fails, as `failed_checks`.

    The cases of `RECORDED` run first, then the check meant to detect the error and those with the
    same letters. The order changes the time, not the number of failed checks.
    """
    backend, meant = ERRORS[error]
    against = [] if error in WRONG_STATES else [ToyBackend]
    target = make_target(backend, device="cpu", against=against, quick=quick)
    checks = {check.id: check for check in CHECKS if check.kind in target.kinds}
    cases = functools.cache(lambda check: select_cases(checks[check], target))
    near = sorted(checks, key=lambda check: (check != meant, _letters(check) != _letters(meant)))
    recorded = [(check, case) for check, case in RECORDED.get(error, ()) if check in checks]
    failed: dict[str, str] = {}
    for check, case in (*recorded, *((check, None) for check in near)):
        if len(failed) == most:
            break
        for each in () if check in failed else cases(check):
            if case in (None, each.id):
                result = run_check_case(checks[check], each, target)
                if result.outcome is Outcome.FAIL:
                    failed[check] = each.id
                    break
    return failed


def _letters(check: str) -> str:
    return check.rstrip(digits)


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
    parser.add_argument(
        "--record", action="store_true", help=f"write {FILE.name}: two cases of each error"
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.record:
        found = {error: list(failed_cases(error, most=2).items()) for error in ERRORS}
        lines = [f"{json.dumps(error)}: {json.dumps(cases)}" for error, cases in found.items()]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
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
