"""`attnlib compile`: compile the kernels of a model for a GPU that this machine does not have."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from attnlib.ahead_of_time import StoredKernel, compile_kernels
from attnlib.cli.arguments import CommandParser, any_device, output_folder, workers
from attnlib.cli.hf_file import read_config
from attnlib.cli.layer_kinds import has_states
from attnlib.cli.server_flags import add_server_flags, rank_specs, server_of
from attnlib.cli.spec_flags import add_spec_flags, specs_of
from attnlib.device import resolve_device
from attnlib.ops.dispatch import processors

__all__ = ["main", "parser"]

_MOST_PROCESSES = 8
"""Each one finds all kernels before it compiles its own."""
_STATES = (
    "the state layers of this model are not among them, because their kernels follow from the "
    "tensors of the engine: they are compiled on the server, by warmup"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, and print what was compiled; returns 0."""
    options = parser().parse_args(argv)
    specs = rank_specs(specs_of(options), options.tensor_parallel)
    server, started = server_of(options), time.perf_counter()
    folder = Path(options.out) if options.out else None
    kernels = compile_kernels(server, specs, folder, options.processes)
    seconds = time.perf_counter() - started
    notes = [_STATES] if options.config and has_states(read_config(options.config)[1]) else []
    if options.json:
        found = {"seconds": round(seconds, 1), "kernels": [kernel._asdict() for kernel in kernels]}
        print(json.dumps(found | ({"notes": notes} if notes else {}), indent=2))
        return 0
    compiled = [kernel for kernel in kernels if kernel.seconds]
    print(
        f"{len(kernels)} kernels for {server.device}, {server.chip().num_sms} multiprocessors: "
        f"{len(compiled)} compiled, {len(kernels) - len(compiled)} found, in {seconds:.0f} s"
    )
    print("\n".join([*_rows(kernels), *(f"note: {note}" for note in notes)]))
    if folder is not None:
        print(f"on the server: ATTNLIB_KERNELS={folder.absolute()}")
    return 0


def _rows(kernels: Sequence[StoredKernel]) -> list[str]:
    """Each kernel function, and how many kernels were made of it."""
    counts = Counter(kernel.name for kernel in kernels)
    return [f"  {name:<28} {number}" for name, number in counts.items()]


def _gpu(text: str) -> str:
    """A GPU of this machine or of another one."""
    if resolve_device(any_device(text)).type != "cuda":
        raise argparse.ArgumentTypeError(
            f"{text} has no kernels to compile: give a GPU, such as sm_90 or H200"
        )
    return text


def parser() -> CommandParser:
    """The arguments of `attnlib compile`."""
    made = CommandParser(
        prog="attnlib compile",
        description="Compile the Triton kernels that layers need on a GPU, on a machine without "
        "it. The server then compiles none: set ATTNLIB_KERNELS there. Under the same limits its "
        "warm-ups do not search for kernels. Triton, attnlib, ptxas and the compiler's environment "
        "variables must be the same.",
    )
    made.add_argument(
        "--device",
        type=_gpu,
        required=True,
        help='the GPU: sm_80, sm_90, sm_100, ... or its name, such as H200 or "NVIDIA H100 PCIe"',
    )
    made.add_argument(
        "--out",
        type=output_folder,
        metavar="FOLDER",
        help="write the kernels and a manifest here, to ship (default: Triton's cache)",
    )
    made.add_argument(
        "--processes",
        type=workers,
        default=min(processors(), _MOST_PROCESSES),
        metavar="N",
        help="compile in N processes (default: one for each CPU, at most 8)",
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    add_server_flags(made)
    add_spec_flags(made)
    return made
