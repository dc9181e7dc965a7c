"""`attnlib tune`: arguments and the run."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence

from attnlib.bench.arguments import backend_names
from attnlib.bench.backends import split_names
from attnlib.bench.suites import SUITES
from attnlib.cli.arguments import (
    CommandParser,
    add_device_flag,
    input_file,
    output_file,
    seconds,
)
from attnlib.cli.spec_flags import add_spec_flags
from attnlib.cli.tune.plan import plan_cases
from attnlib.cli.tune.session import Session, active_table
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import ContractError
from attnlib.tuning.tuner import Tuner

__all__ = ["main", "parser"]


def parser() -> CommandParser:
    """The arguments of `attnlib tune`."""
    made = CommandParser(
        prog="attnlib tune",
        description="Measure backends and their tunable parameters on this chip, and write the "
        "table that automatic selection uses. Results with a wrong output do not count.",
        epilog="A CASE is one of attnlib bench: a name, a glob, or BATCH[@KEY=VALUE,...]. Or give "
        "a spec, or --config, and --shapes q1s8k,q4k.",
    )
    made.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="what to measure (default: the quick suite on a GPU, the cpu suite elsewhere)",
    )
    made.add_argument("--suite", choices=tuple(SUITES), help="named cases of attnlib bench")
    made.add_argument(
        "--shapes",
        metavar="BATCH,...",
        help="batches for the layers of the spec, such as q1s8k,8q1s4k,q4k",
    )
    made.add_argument(
        "--ops",
        metavar="OP,...",
        help="operations whose parameters to measure, such as decode,hopper_prefill, or none "
        "(default: all operations that backends can tune on this device)",
    )
    made.add_argument(
        "--backends",
        type=backend_names,
        metavar="NAME,...",
        help="backends to rank, or none (default: all that can run here)",
    )
    made.add_argument(
        "--from-bench",
        nargs="+",
        type=input_file,
        metavar="FILE",
        help="rank backends by results of attnlib bench --json on this chip instead of measuring",
    )
    add_device_flag(made)
    made.add_argument(
        "--out",
        type=output_file,
        metavar="FILE",
        help="the table (default: the one that attnlib reads, ATTNLIB_TUNING or the user's cache)",
    )
    made.add_argument(
        "--limit-seconds",
        type=seconds,
        metavar="S",
        help="start nothing after S seconds; the table holds what was measured by then",
    )
    made.add_argument("--quick", action="store_true", help="fewer shapes and candidates")
    made.add_argument("--commit", help="attnlib's commit; needed outside a git clone")
    add_spec_flags(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """`attnlib tune`; 0 if the table was written, 1 if there is no result."""
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = parser().parse_args(arguments)
    info = resolve_device(options.device)
    session = Session(options, info, "attnlib tune " + shlex.join(arguments))
    operations = _operations(options, info, session.tuners)
    needs_cases = bool(operations) or not options.from_bench
    cases, left_out = plan_cases(options, info.type) if needs_cases else ([], [])
    session.begin()
    for line in left_out:
        session.say(f"left out: {line}")
    with active_table(session.path):
        if operations:
            session.tune(cases, operations)
        session.rank_backends(cases)
    return session.finish()


def _operations(
    options: argparse.Namespace, info: DeviceInfo, tuners: Mapping[str, Tuner]
) -> tuple[str, ...]:
    """The operations to measure.

    Raises:
        ContractError: no backend can tune the operation on this device.
    """
    known = tuple(dict.fromkeys(name for tuner in tuners.values() for name in tuner.operations))
    if options.ops is None:
        return () if options.from_bench else known
    names = () if options.ops == "none" else tuple(split_names(options.ops))
    for name in names:
        if not known:
            raise ContractError(
                f"--ops {options.ops}: no backend has tunable operations on {info} (triton has "
                "them on a GPU); leave --ops out to rank backends"
            )
        if name not in known:
            raise ContractError(f"--ops {name} is unknown; write {', '.join(known)}, or none")
    return names
