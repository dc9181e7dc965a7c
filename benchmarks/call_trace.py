"""How many files and Python functions of attnlib one layer call enters, and what it caches.

    python benchmarks/call_trace.py                 # needs a GPU; on Hopper the Gluon kernels run
    python benchmarks/call_trace.py --json FILE
    PYTHONPATH=TREE python benchmarks/call_trace.py     # of another tree

Prints, for each kind of call, the number of source files of attnlib whose functions run and the
number of Python calls into them; then the module-level caches of `ops/triton`.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from layer_calls import LayerCall

import attnlib
from attnlib.bench.provenance import provenance

PACKAGE = Path(attnlib.__file__).resolve().parent
TARGETS = {
    "repeated decode layer": 2,
    "repeated prefill layer": 2,
    "repeated mixed layer": 2,
    "first decode layer of a step": 7,
    "build of 256 decodes": 12,
    "repeated decode of a state layer": 8,
}


def trace(call: Callable[[], object]) -> tuple[set[str], int]:
    """The files of attnlib that a call enters, and the number of Python calls into them."""
    files: set[str] = set()
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        name = frame.f_code.co_filename  # type: ignore[attr-defined]
        if event == "call" and name.startswith(str(PACKAGE)):
            files.add(str(Path(name).relative_to(PACKAGE)))
            count += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files, count


def step(call: LayerCall, seq_len: int) -> None:
    """Build the metadata of a step whose sequences have at most `seq_len` keys, the batch's or
    more."""
    common = call.common
    fields = {**vars(common), "max_seq_len": seq_len}
    call.metadata = call.builder.build(0, type(common)(**fields))


def state_decode(device: str, backend: Any) -> Callable[[], object]:
    """A decode of four requests by a layer over states."""
    spec = attnlib.StateSpec(
        num_heads=32, num_key_heads=16, key_size=128, value_size=128, qk_norm=True,
        dtype=torch.bfloat16,
    )  # fmt: skip
    layer = attnlib.StateLayer(spec, backend=backend, device=device)
    cache = attnlib.StateCache.allocate(layer.spec, 4, device=device)
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1] * 4, [1] * 4, device=device, state_slots=[0, 1, 2, 3]
    )
    metadata = layer.backend.make_builder(layer.spec, device).build(0, common)
    keys, values = (torch.zeros(4, n, 128, dtype=spec.dtype, device=device) for n in (16, 32))
    gates = torch.zeros(4, 32, device=device)
    return lambda: layer(keys, keys, values, gates, gates, cache, metadata)


def traces(device: str = "cuda", backend: Any = "triton") -> dict[str, tuple[set[str], int]]:
    """Each kind of call, after everything is compiled and bound.

    Args:
        device, backend: of the layers; tests replace the launches of a backend on the CPU.
    """
    kinds = {
        "repeated decode layer": ([1] * 4, [4096] * 4),
        "repeated prefill layer": ([512], [512]),
        "repeated mixed layer": ([1] * 16 + [256], [2048] * 16 + [256]),
    }
    found = {}
    for name, lengths in kinds.items():
        call = LayerCall(*lengths, device=device, backend=backend)
        for _ in range(4):
            call()
        found[name] = trace(call)
    call = LayerCall([1] * 4, [4090] * 4, device=device, backend=backend)
    for length in (4091, 4092, 4093):
        step(call, length)
        for _ in range(3):
            call()
    step(call, 4094)
    found["first decode layer of a step"] = trace(call)
    call()
    many = LayerCall([1] * 256, [100] * 256, device=device, backend=backend)
    for _ in range(3):
        many.builder.build(0, many.common)
    found["build of 256 decodes"] = trace(lambda: many.builder.build(0, many.common))
    decode = state_decode(device, backend)
    for _ in range(4):
        decode()
    found["repeated decode of a state layer"] = trace(decode)
    call.metadata = call.builder.build(0, call.common)
    spec = call.spec.replace(has_sink=False, logits_soft_cap=30.0)
    call.layer = attnlib.Attention(spec, backend=backend, device=device)
    found["first call of a new kind of layer"] = trace(call)
    return found


def module_caches() -> list[str]:
    """Module-level caches of ops/triton: cached functions and dictionaries that functions fill."""
    found = []
    for path in sorted((PACKAGE / "ops" / "triton").rglob("*.py")):
        module = path.relative_to(PACKAGE)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                cached = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any("cache" in text.partition("(")[0] for text in cached):
                    found.append(f"{module}: {node.name} ({', '.join(cached)})")
            value = getattr(node, "value", None)
            empty = isinstance(value, ast.Dict) and not value.keys
            made = isinstance(value, ast.Call) and ast.unparse(value.func).endswith(
                ("Cache", "dict", "Dictionary", "Remembered", "Remembered[Any]")
            )
            if isinstance(node, ast.Assign | ast.AnnAssign) and (empty or made):
                found.append(f"{module}: {ast.unparse(node).splitlines()[0]}")
    return found


def main() -> None:
    """Print the table; with --json also write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="commit, where there is no repository")
    arguments = parser.parse_args()
    caches = module_caches()
    rows: dict[str, dict[str, object]] = {}
    if torch.cuda.is_available():
        with torch.inference_mode():
            for name, (files, calls) in traces().items():
                rows[name] = {"files": sorted(files), "calls": calls}
                target = f"(target {TARGETS[name]})" if name in TARGETS else ""
                print(f"{name:<36}{len(files):>4} files {target:<11}{calls:>5} calls")
                print("    " + ", ".join(sorted(files)))
    else:
        print("no GPU: call traces need one")
    print(f"module-level caches in ops/triton: {len(caches)} (target 8)")
    for cache in caches:
        print("    " + cache)
    if arguments.json:
        document = {**provenance(commit=arguments.commit), "calls": rows, "caches": caches}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
