"""Run every measurement and check that the project publishes for a GPU.

    python benchmarks/gpu/run_all.py --list                 # the steps and their commands
    python benchmarks/gpu/run_all.py --out results          # all steps
    python benchmarks/gpu/run_all.py --only bench figures parity --limit-seconds 560
    python benchmarks/gpu/run_all.py --only kernels --devices 0 1 --limit-seconds 520 --jobs 12

The last command measures the device times of the Hopper kernels: slow rows, quantized caches, wide
heads, small pages, latents, rows with a target, state layers, selected keys, and the anchors suite.
With `--devices`, each GPU takes the next step when it is free, and runs one step at a time; host
times need a run without it.

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
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.gpu.schedule import Job, run_jobs  # noqa: E402


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: name of the step and of its output file.
        command: arguments of the Python interpreter; `{out}` is the output directory. The option
            `--commit` of the run is added to commands of `attnlib bench` and `benchmarks.gpu`.
        description: what it measures or checks.
        after: the step whose results it reads.
    """

    name: str
    command: str
    description: str
    after: str = ""

    def arguments(self, out: Path, commit: str | None = None, jobs: int = 1) -> list[str]:
        """The arguments with the output directory, the commit and the processes filled in."""
        found = [part.replace("{out}", str(out)) for part in shlex.split(self.command)]
        if commit and self.command.startswith(_NAMES_COMMIT):
            found += ["--commit", commit]
        if jobs > 1:
            options = (option for start, option in _JOBS.items() if self.command.startswith(start))
            found += [f"{option}{jobs}" for option in options]
        return found


_NAMES_COMMIT = (
    "-m attnlib bench",
    "-m benchmarks.gpu",
    "benchmarks/gpu/generate.py",
    "benchmarks/gpu/hybrid_model.py",
)
"""Commands that take `--commit`."""
_JOBS = {
    "-m attnlib bench": "--compile-jobs=",
    "-m attnlib verify": "--jobs=",
    "-m pytest": "-n",
}
"""The option of a command that tells its processes."""


_FLOAT8_DECODES = (
    "1x1k", "1x8k", "8x8k", "32x4k", "256x1k", "64x8k", "128x2k", "16x4k", "4x32k", "1x128k",
    "ragged48", "32x4k-mha",
)  # fmt: skip

KERNELS = (
    Step(
        "slow_rows",
        "-m attnlib bench cov-prefill-1x8k-cap30 cov-prefill-1x8k-d80 cov-prefill-1x8k-d96-mha "
        "cov-prefill-1x8k-d112 cov-decode-32x4k-d96-mha cov-decode-32x16k-w4096 "
        "cov-prefill-1x16k-w4096 cov-prefill-1x8k-bidirectional cov-prefill-1x8k-unpaged "
        "cov-prefill-1x128k-p128 decode-32x8k-d256-cap50 e4m3-decode-32x8k-d256-cap50 "
        "--backends triton,flash_attn --kernels-only --json {out}/slow_rows.json",
        "rows that FlashInfer does not have, or compiles for a minute",
    ),
    Step(
        "coverage",
        "-m attnlib bench cov-decode-48x5k-28heads cov-decode-1x60k-and-31x500 "
        "cov-mixed-8x1k-and-300 cov-prefill-512-over-20k-and-3k cov-verify-24x8-over-2k "
        "cov-prefill-1x8k-d64 prefill-1x8k-d64-sinks decode-32x4k cov-decode-32x4k-p1 "
        "cov-decode-32x4k-p8 cov-prefill-1x8k-p16 cov-prefill-1x8k-p1 cov-prefill-1x8k-p8 "
        "--backends triton,flash_attn,flashinfer --kernels-only --json {out}/coverage.json",
        "uneven and small batches, heads of 64, blocks of 1 and 8",
    ),
    Step(
        "wide_heads",
        "-m attnlib bench cov-decode-32x4k-d512 cov-prefill-1x4k-d512 "
        "--backends triton,benchmarks/gpu/variants.py:Portable --kernels-only "
        "--json {out}/wide_heads.json",
        "heads of 512, beside the portable kernels and the read rate",
    ),
    Step(
        "float8_products",
        "-m benchmarks.gpu.float8_products --out {out}/float8_products.json",
        "prefill over a float8 cache, with bfloat16 and with float8 products",
    ),
    Step(
        "float8_decodes",
        "-m attnlib bench "
        + " ".join(f"e4m3-decode-{name} decode-{name}" for name in _FLOAT8_DECODES)
        + " --backends triton,flashinfer --kernels-only --json {out}/float8_decodes.json",
        "decodes over a float8 cache, each beside bfloat16",
    ),
    Step(
        "formats",
        "-m attnlib bench --suite formats --backends triton --kernels-only "
        "--json {out}/formats.json",
        "caches with scales in the page",
    ),
    Step(
        "anchors_kernels",
        "-m attnlib bench --suite anchors --backends triton,flash_attn,flashinfer --kernels-only "
        "--json {out}/anchors_kernels.json",
        "the published rows, device times only",
    ),
    Step(
        "xqa",
        "-m attnlib bench "
        + " ".join(f"fp8q-decode-{name}" for name in _FLOAT8_DECODES)
        + " --backends triton,benchmarks/gpu/peers.py:Xqa --kernels-only "
        "--json {out}/xqa.json",
        "the decodes over a float8 cache beside XQA, which rounds queries and weights",
    ),
    Step(
        "latents",
        "-m attnlib bench --suite mla --backends triton,flash_mla,flash_attn --kernels-only "
        "--json {out}/latents.json",
        "latent caches, and the expanded prefill of the same model",
    ),
    Step(
        "gaps",
        "-m attnlib bench --suite gaps --backends "
        "triton,flash_attn,flashinfer,flash_mla,flashinfer_mla,benchmarks/gpu/peers.py:Xqa "
        "--kernels-only --json {out}/gaps.json",
        "rows with a target: most time beside the best peer or the same layer over bfloat16",
    ),
    Step(
        "states",
        "-m attnlib bench --suite states --backends triton,fla,flashinfer_gdn --kernels-only "
        "--json {out}/states.json",
        "state layers with targets: decodes, verification, prefills, steps in one launch",
    ),
    Step(
        "state_peers",
        "-m benchmarks.gpu.state_peers --out {out}/state_peers.json",
        "kernels of state layers beside those of other packages, in CUDA graphs",
    ),
    Step(
        "expanded_prefill",
        "-m benchmarks.gpu.expanded_prefill --out {out}/expanded_prefill.json",
        "the expanded prefill over blocks and packed, beside FlashAttention 3",
    ),
    Step(
        "selected_keys",
        "-m benchmarks.gpu.selected_keys --out {out}/selected_keys.json",
        "selected tokens and blocks, and the indexer",
    ),
    Step(
        "retrieval",
        "-m benchmarks.gpu.retrieval --processes 8 --out {out}/retrieval.json",
        "single values found among 131072 keys, for each format and kernel",
    ),
)  # fmt: skip
"""Device times and retrieval of the kernels, about twelve minutes on one H200 without `gaps` and
`states`."""

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
        after="bench",
    ),
    *KERNELS,
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
    Step(
        "generate",
        "benchmarks/gpu/generate.py --few-layers --out {out}/generate.json",
        "tokens per second of transformers, beside its other implementations",
    ),
    Step(
        "hybrid_model",
        "benchmarks/gpu/hybrid_model.py --out {out}/hybrid_model.json",
        "tokens per second of a model with state layers",
    ),
    Step(
        "stored_formats",
        "-m benchmarks.gpu.stored_formats --out {out}/stored_formats.json",
        "writes of rotated caches, and decodes over open formats",
    ),
    Step(
        "batch_invariant",
        "-m benchmarks.gpu.batch_invariant --out {out}/batch_invariant.json",
        "batch-invariant layers beside the same layers without",
    ),
    Step(
        "start_time",
        "benchmarks/gpu/start_time.py --out {out}/start_time.json",
        "start of a server with and without compiled kernels",
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
            f"the conformance suite on {name} of benchmarks/gpu/variants.py",
        )
        for name in ("Hopper", "LongContext", "Portable")
    ),
    Step(
        "certificate",
        "-m attnlib verify triton --certify batch-invariance --json {out}/certificate.json",
        "equal bits of batch-invariant layers in all batches, splits, drafts and graphs",
    ),
    Step(
        "parity",
        "-m attnlib parity triton flash_attn flashinfer torch --json {out}/parity.json",
        "largest difference of every pair of backends on one cache",
    ),
    Step("tests", "-m pytest -m gpu -q -ra tests", "the tests that need a GPU"),
)


def save(results: list[dict[str, Any]], out: Path, commit: str | None) -> None:
    from attnlib.bench.provenance import provenance

    document = {"provenance": provenance(commit=commit), "steps": results}
    (out / "run_all.json").write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in STEPS]
    parser.add_argument("--list", action="store_true", help="print the steps and exit")
    parser.add_argument(
        "--only", nargs="+", choices=["kernels", *names], metavar="STEP", default=names,
        help="steps to run; kernels: those with device times of the kernels",
    )  # fmt: skip
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
    parser.add_argument(
        "--devices", nargs="+", metavar="GPU", default=[],
        help="GPUs that each run one step at a time (default: one step, which sees all GPUs)",
    )  # fmt: skip
    parser.add_argument("--commit", help="commit of attnlib, for copies without history")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N",
        help="processes that compile kernels before they are timed, and run checks (default 1)",
    )  # fmt: skip
    options = parser.parse_args()
    if options.list:
        for step in STEPS:
            print(f"{step.name:<24} {step.description}\n{'':<24} python {step.command}")
        return 0
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    group = {step.name for step in KERNELS} if "kernels" in options.only else set()
    steps = [step for step in STEPS if step.name in group or step.name in options.only]
    jobs = [
        Job(
            step.name,
            1 if options.devices else None,
            options.step_seconds,
            [sys.executable, *step.arguments(out, options.commit, options.jobs)],
            step.after,
        )
        for step in steps
    ]
    # FlashAttention 4 caches its kernels.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    results: list[dict[str, Any]] = []

    def ended(last: dict[str, Any]) -> None:
        results.append(last)
        lines = [f"{last['name']}: {last['state']} ({last['seconds']:.0f} s)"]
        print("\n    ".join([*lines, *last.get("tail", [])]), flush=True)
        save(results, out, options.commit)

    seconds = options.limit_seconds
    run_jobs(jobs, out, devices=options.devices, seconds=seconds, ended=ended)
    return 0 if all(result["state"] == "passed" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
