"""Hash the machine code of every compiled kernel, to prove that a change leaves the kernels as they are.

`python benchmarks/kernel_sass.py --out FILE` compiles every case of `tests/ops/triton/hopper/cross_compile.py` and
`tests/ops/triton/cross_compile.py` for sm_90 without a GPU, disassembles the cubins and writes one SHA-256 per case.
`--compare FILE` compares with an earlier file and exits with status 1 on a difference. Both runs must use the same
version of Triton, which brings its own ptxas. Select the tree to compile with PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
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
    options = parser.parse_args()

    cases = {name: run for name, run in all_cases().items() if name in (options.cases or [name])}
    hashes: dict[str, str] = {}
    for name, run in cases.items():
        text = compile_to_sass(run)
        hashes[name] = hashlib.sha256(text.encode()).hexdigest()
        print(name, hashes[name][:16], flush=True)
        if options.dump:
            options.dump.mkdir(parents=True, exist_ok=True)
            (options.dump / f"{name.replace('/', '_').replace(':', '_')}.sass").write_text(text)
    if options.out:
        result = {"triton": triton.__version__, "target": TARGET, "sha256": hashes}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.compare:
        sys.exit(compare(json.loads(options.compare.read_text()), hashes, bool(options.cases)))


def all_cases() -> dict[str, Callable[[], Any]]:
    """Map `hopper/CASE` and `plain/CASE` to a function that compiles the kernels of the case."""
    from tests.ops.triton import cross_compile as plain
    from tests.ops.triton.hopper import cross_compile as hopper

    cases: dict[str, Callable[[], Any]] = {}
    for name in [*hopper.CASES, *hopper.entry_cases()]:
        cases[f"hopper/{name}"] = lambda name=name: hopper.compile_case(name)
    names = list(plain.CASES)
    for name, entry in plain.entry_cases().items():
        if plain.entry_fits(entry, TARGET):
            names.extend(name + ending for ending in plain.formats_of(entry, TARGET) or [""])
    for name in names:
        cases[f"plain/{name}"] = lambda name=name: plain.compile_for(TARGET, [name])
    return cases


def compile_to_sass(run: Callable[[], Any]) -> str:
    """Call `run` and return the normalized SASS of every kernel that it compiles, in launch order."""
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
        raise RuntimeError("the case compiled no kernel")
    return "\n".join(sass_of(kernel) for kernel in compiled)


def sass_of(kernel: Any) -> str:
    """Return the instructions and encodings of a compiled kernel, without its name and the name of its file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.nvdisasm.path
        command = [tool, "-c", "-hex", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = re.sub(rf"\b{re.escape(kernel.metadata.name)}\b", "kernel", text)
    lines = (
        line.rstrip() for line in text.splitlines() if not re.match(r"\s*//##|\s*\.file\b", line)
    )
    return f"shared {kernel.metadata.shared} warps {kernel.metadata.num_warps}\n" + "\n".join(lines)


def compare(earlier: dict[str, Any], hashes: dict[str, str], selected: bool) -> int:
    """Print the differences between two runs and return the exit status."""
    if earlier["triton"] != triton.__version__:
        print(
            f"the file is from Triton {earlier['triton']}, this is {triton.__version__}: use the same version"
        )
        return 2
    before = earlier["sha256"]
    if selected:
        before = {name: value for name, value in before.items() if name in hashes}
    changed = [name for name in before if name in hashes and before[name] != hashes[name]]
    for word, names in (
        ("changed", changed),
        ("removed", [name for name in before if name not in hashes]),
        ("added", [name for name in hashes if name not in before]),
    ):
        if names:
            print(f"{word}: {', '.join(names)}")
    same = len(hashes) - len([name for name in hashes if before.get(name) != hashes[name]])
    print(f"{same} of {len(before)} cases are identical")
    return int(same != len(before) or len(hashes) != len(before))


if __name__ == "__main__":
    main()
