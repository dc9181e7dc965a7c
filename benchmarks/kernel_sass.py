"""Hash the machine code of every compiled kernel, to show that a change leaves it as it is.

    python benchmarks/kernel_sass.py --out before.json      # PYTHONPATH selects the tree
    python benchmarks/kernel_sass.py --compare before.json

Compiles every case of `tests/ops/triton/cross_compile.py` and of its `hopper` counterpart for sm_90
without a GPU, disassembles the cubins and hashes instructions, encodings, shared memory and number
of warps. Names of kernels and files do not count. A comparison exits with status 1 on a difference.
Both runs need the same version of Triton, because Triton includes the compiler and ptxas.

Line information changes the order of instructions: ptxas moves none over the labels that mark where
an inlined function begins and ends. With `--no-lines` kernels are compiled without it, so that a
change that only divides or joins functions leaves the machine code as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.runtime.jit import JITFunction

TARGET = "sm_90"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="cases to compile (default: all)")
    parser.add_argument("--out", type=Path, help="write the hashes to this JSON file")
    parser.add_argument("--compare", type=Path, help="compare with the hashes of this JSON file")
    parser.add_argument("--dump", type=Path, help="write the normalized SASS to this directory")
    parser.add_argument("--no-lines", action="store_true", help="compile without line information")
    options = parser.parse_args()
    lines = not options.no_lines
    triton.knobs.compilation.disable_line_info = not lines

    known = all_cases()
    hashes: dict[str, str] = {}
    for name in options.cases or [name for name in known if name not in score_cases()]:
        text = compile_to_sass(known[name])
        hashes[name] = hashlib.sha256(text.encode()).hexdigest()
        print(name, hashes[name][:16], flush=True)
        if options.dump:
            options.dump.mkdir(parents=True, exist_ok=True)
            (options.dump / f"{re.sub('[/:]', '_', name)}.sass").write_text(text)
    if options.out:
        result = {
            "triton": triton.__version__, "target": TARGET, "lines": lines, "sha256": hashes
        }  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.compare:
        earlier = json.loads(options.compare.read_text())
        sys.exit(compare(earlier, hashes, lines, every_case=not options.cases))


def all_cases() -> dict[str, Callable[[], Any]]:
    """Map `hopper/CASE` and `plain/CASE` to a function that compiles the kernels of the case."""
    from tests.ops.triton import cross_compile as plain
    from tests.ops.triton.hopper import cross_compile as hopper

    cases: dict[str, Callable[[], Any]] = {}
    tables = (
        hopper.LATENT_CASES, hopper.SELECTED_CASES, hopper.INVARIANT_CASES, hopper.SHARED_CASES,
        hopper.STREAM_CASES, hopper.SCORE_CASES,
    )  # fmt: skip
    for name in [*hopper.CASES, *itertools.chain(*tables), *hopper.entry_cases()]:
        cases[f"hopper/{name}"] = lambda name=name: hopper.compile_case(name)
    names = list(plain.CASES)
    for name, entry in plain.entry_cases().items():
        if plain.entry_fits(entry, TARGET):
            names.extend(name + ending for ending in plain.formats_of(entry, TARGET) or [""])
    for name in names:
        cases[f"plain/{name}"] = lambda name=name: plain.compile_for(TARGET, [name])
    return cases


def score_cases() -> set[str]:
    """Return the cases with a score function, which are compiled only where they are named."""
    from tests.ops.triton.hopper import cross_compile as hopper

    return {f"hopper/{name}" for name in hopper.SCORE_CASES}


def compile_to_sass(run: Callable[[], Any]) -> str:
    """Call `run` and return the normalized SASS of all kernels that it compiles, in launch order.

    Raises:
        RuntimeError: `run` compiled nothing.
    """
    compiled: list[Any] = []
    original = JITFunction.run

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = original(self, *args, **kwargs)
        compiled.append(kernel)
        return kernel

    # The cross-compilers replace JITFunction.run by a function that calls the one they find here.
    JITFunction.run = record
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run()
    finally:
        JITFunction.run = original
    if not compiled:
        raise RuntimeError("the case compiled no kernel; check that its launcher calls Triton")
    return "\n".join(sass_of(kernel) for kernel in compiled)


def sass_of(kernel: Any) -> str:
    """Return the instructions of a compiled kernel with their encodings, without its name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", "-hex", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = re.sub(rf"\b{re.escape(kernel.metadata.name)}\b", "kernel", text)
    # Comment lines hold file names, and rulers whose length depends on the kernel's name.
    lines = [" ".join(line.split()) for line in text.splitlines()]
    code = [line for line in lines if line and not line.startswith(("//", ".file"))]
    head = f"shared {kernel.metadata.shared} warps {kernel.metadata.num_warps}"
    return "\n".join([head, *code])


def compare(earlier: dict[str, Any], hashes: dict[str, str], lines: bool, every_case: bool) -> int:
    """Print the differences between two runs and return the exit status."""
    if earlier.get("lines", True) != lines:
        print("one run has line information and the other one has none; compare runs of one kind")
        return 2
    if earlier["triton"] != triton.__version__:
        versions = f"the file is from Triton {earlier['triton']}, this is {triton.__version__}"
        print(f"{versions}; compare runs of the same version")
        return 2
    before: dict[str, str] = earlier["sha256"]
    names = sorted(before.keys() | hashes.keys() if every_case else hashes)
    differences = [name for name in names if before.get(name) != hashes.get(name)]
    for name in differences:
        change = "changed" if name in before and name in hashes else "present in one run only"
        print(f"{name}: {change}")
    print(f"{len(names) - len(differences)} of {len(names)} cases are identical")
    return int(bool(differences))


if __name__ == "__main__":
    main()
