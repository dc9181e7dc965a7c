"""Run every measurement and check that the project publishes for a GPU.

    python benchmarks/gpu/run_all.py --list                 # the steps and their commands
    python benchmarks/gpu/run_all.py --out results          # all steps
    python benchmarks/gpu/run_all.py --only bench figures parity --limit-seconds 560

Each step is one command with a time limit. Its output goes to `<step>.txt` in the output directory
while it runs, so that a stopped run keeps what it printed. A step that fails or is stopped does not
affect the next one. `run_all.json` records the state of each step with hardware, versions and
commit.

Backends whose package is not installed are reported as unavailable. FlashInfer compiles its kernels
on first use; `flashinfer_kernels.py` compiles them in advance.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

TAIL_LINES = 14
MIN_SECONDS = 10.0
"""Steps that would have less time are not started."""


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: name of the step and of its output file.
        command: arguments of the Python interpreter; `{out}` is the output directory.
        description: what it measures or checks.
    """

    name: str
    command: str
    description: str

    def arguments(self, out: Path) -> list[str]:
        """The arguments with the output directory filled in."""
        return [part.replace("{out}", str(out)) for part in shlex.split(self.command)]


STEPS = (
    Step(
        "bench",
        "-m attnlib bench --suite anchors --backends triton,flash_attn,flashinfer "
        "--json {out}/bench.json",
        "time of every backend on the published rows",
    ),
    Step(
        "figures",
        "-m attnlib bench --from-json {out}/bench.json --figures {out}/figures",
        "the figures of these rows",
    ),
    Step("host_costs", "benchmarks/host_costs.py", "host time of selection, build and layer calls"),
    Step(
        "call_trace",
        "benchmarks/call_trace.py --json {out}/call_trace.json",
        "files and Python functions that a layer call enters",
    ),
    Step("demo", "-m attnlib demo", "continuous batching, checked against eager attention"),
    Step(
        "decoder_tokens",
        "benchmarks/gpu/decoder_tokens.py --limit-seconds 500",
        "tokens per second and tokens of a decoder with 8B parameters",
    ),
    *(
        Step(
            f"verify_{backend}",
            f"-m attnlib verify {backend} --json {{out}}/verify_{backend}.json",
            f"the conformance suite on {backend}",
        )
        for backend in ("triton", "flash_attn", "flashinfer")
    ),
    *(
        Step(
            f"verify_triton_{name.lower()}",
            f"-m attnlib verify benchmarks/gpu/variants.py:{name}",
            f"the conformance suite on triton with kernels={name.lower()}",
        )
        for name in ("Hopper", "Portable")
    ),
    Step(
        "parity",
        "-m attnlib parity triton flash_attn flashinfer torch --json {out}/parity.json",
        "largest difference of every pair of backends on one cache",
    ),
    Step("tests", "-m pytest -m gpu -q -ra tests", "the tests that need a GPU"),
)


def environment() -> dict[str, str]:
    """The environment of the steps: attnlib is importable, FlashAttention 4 caches its kernels."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [found.get("PYTHONPATH", ""), str(ROOT)]))
    found.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    found["PYTHONUNBUFFERED"] = "1"
    return found


def run_step(step: Step, out: Path, seconds: float) -> dict[str, Any]:
    """Run one step for at most `seconds`; returns its state and the end of its output."""
    began = time.monotonic()
    text, arguments = out / f"{step.name}.txt", step.arguments(out)
    with text.open("w") as sink:
        sink.write(f"# python {shlex.join(arguments)}\n")
        sink.flush()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**environment(), "OUT": str(out)},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = text.read_text(errors="replace").splitlines()
    ended = f"stopped after {seconds:.0f} s" if code is None else f"failed, exit {code}"
    return {
        "step": step.name,
        "command": f"python {shlex.join(arguments)}",
        "state": "passed" if code == 0 else ended,
        "seconds": round(time.monotonic() - began, 1),
        "tail": lines[-TAIL_LINES:],
    }


def save(results: list[dict[str, Any]], out: Path) -> None:
    from attnlib.bench.provenance import provenance

    document = {"provenance": provenance(), "steps": results}
    (out / "run_all.json").write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in STEPS]
    parser.add_argument("--list", action="store_true", help="print the steps and exit")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", default=names)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "gpu-results")),
        help="output directory (default: $OUT, else gpu-results)",
    )
    parser.add_argument(
        "--step-seconds", type=float, default=900.0, help="time limit of one step (default 900)"
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=float("inf"),
        help="time limit of the run; steps without time are not started",
    )
    options = parser.parse_args()
    if options.list:
        for step in STEPS:
            print(f"{step.name:<24} {step.description}\n{'':<24} python {step.command}")
        return 0
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.limit_seconds
    results: list[dict[str, Any]] = []
    for step in STEPS:
        if step.name not in options.only:
            continue
        left = end - time.monotonic()
        if left < MIN_SECONDS:
            results.append({"step": step.name, "state": "not run: no time", "seconds": 0.0})
        else:
            print(f"{step.name} ...", flush=True)
            results.append(run_step(step, out, min(left, options.step_seconds)))
        last = results[-1]
        lines = [f"{step.name}: {last['state']} ({last['seconds']:.0f} s)", *last.get("tail", [])]
        print("\n    ".join(lines), flush=True)
        save(results, out)
    return 0 if all(result["state"] == "passed" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
