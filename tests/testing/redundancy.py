"""Switch off one check after another, and list the wrong backends that then pass.

    python -m tests.testing.redundancy [--full] [ERROR ...]

Checks do not affect each other, so that one run of each wrong backend gives the result of all
reduced suites: without a check, a backend passes if no other check fails. The script prints the
failed checks of each wrong backend and exits with 1 if one is detected by a single check that
`ONE_CHECK` does not list.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from attnlib.testing.checks import CHECKS
from attnlib.testing.conformance import run_conformance
from tests.testing.toy_backend import ToyBackend
from tests.testing.wrong_backends import WRONG

__all__ = ["ONE_CHECK", "failed_checks", "undetected_without"]

_ONE_FEATURE = "only this check runs the feature"
ONE_CHECK: dict[str, str] = {
    "second range of keys ignored": "only S1 has score functions with bounds",
    "bounds of the first head for all": "only S1 has score functions with bounds",
    "sink counted twice": "only S2 combines sinks and lists of keys",
    "ties of index scores to the largest position": _ONE_FEATURE,
    "local blocks not always selected": _ONE_FEATURE,
    "ignored scales of index keys": _ONE_FEATURE,
    "sink counted in both key streams": _ONE_FEATURE,
    "entries visible before their tokens are complete": _ONE_FEATURE,
    "ignored entries": _ONE_FEATURE,
    "entries with a softmax of their own": _ONE_FEATURE,
    "queries of one significant bit": _ONE_FEATURE,
    "one scale for a packed latent": _ONE_FEATURE,
    "first scale of a packed latent for all groups": _ONE_FEATURE,
    "invalid scales of packed latents replaced": _ONE_FEATURE,
    "slots past the block table": _ONE_FEATURE,
    "appended behind the first request": _ONE_FEATURE,
    "states merged with equal weights": _ONE_FEATURE,
    "no window in sequences with gaps": _ONE_FEATURE,
    "new keys with the scale of the cache": _ONE_FEATURE,
    "keys that are not normalized": _ONE_FEATURE,
    "the other style of rotation": _ONE_FEATURE,
    "values with the scales of keys": "only Q5 has unequal scales of keys and values in pages",
    "invalid scales of pages replaced": "only Q6 has invalid scales in pages",
    "state shared by layers of all kinds": "only F2 interleaves layers of several kinds",
    "a sharing layer writes": "only K6 compares the cache of a sharing layer before and after",
    "unsupported without a reason": _ONE_FEATURE,
    "int32 offsets": "only O1 has a pool beyond 2^31 elements",
}
"""Error -> why one check alone detects it."""


def failed_checks(error: str, *, quick: bool = True) -> tuple[str, ...]:
    """Ids of the checks that a wrong backend fails, sorted."""
    report = run_conformance(WRONG[error][0], device="cpu", against=[ToyBackend], quick=quick)
    return tuple(sorted(report.failed_checks()))


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
    parser.add_argument("errors", nargs="*", help="errors of WRONG (default: all)")
    parser.add_argument("--full", action="store_true", help="run the full form of each check")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    detected = {}
    for error in args.errors or WRONG:
        detected[error] = failed_checks(error, quick=not args.full)
        print(f"{error}: {', '.join(detected[error]) or 'NOT DETECTED'}", flush=True)
    unexpected = False
    for check, errors in undetected_without(detected).items():
        for error in errors:
            reason = ONE_CHECK.get(error)
            unexpected = unexpected or reason is None
            print(f"without {check}: {error!r} passes ({reason or 'not listed in ONE_CHECK'})")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
