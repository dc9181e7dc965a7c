"""Tokens and tokens per second of a decoder with the shape of Llama 3 8B under `generate_batch`.

    python benchmarks/gpu/decoder_tokens.py                          # 32 layers, all backends
    python benchmarks/gpu/decoder_tokens.py --layers 8 --backends hf:sdpa triton flash_attn
    python benchmarks/gpu/decoder_tokens.py --backends hf:sdpa triton@nographs

ATTNLIB_BACKEND selects each backend. `hf:sdpa` and `hf:eager` are implementations of transformers;
the first one that works is the reference. A backend is correct if its tokens are those of the
reference, or first differ from them at a near tie (see decoder_model.py). `@nographs` forbids the
CUDA graphs that transformers uses if a backend can be captured. Each backend runs in its own
process; `--jobs` processes load and warm up at once, and each is timed while the others are idle. A
backend that fails does not affect the others. `$OUT/decoder_tokens.json` is written after each
backend.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "gpu")]

BACKENDS = [
    "hf:sdpa",
    "hf:eager",
    "triton",
    "triton@nographs",
    "flash_attn",
    "flashinfer",
    "prefill:flash_attn,decode:triton",
]
COLUMNS = [
    "backend",
    "served by",
    "same tokens",
    "differs at a near tie",
    "differs otherwise",
    "tokens/s",
    "ms/step",
    "graphs",
    "peak GiB",
]


def serve(options: argparse.Namespace, name: str) -> None:
    """Child process: make the model, warm up, then run the commands of stdin.

    Answers are @ and JSON.
    """
    state: dict[str, Any] = {}
    _answer(lambda: _prepare(options, name, state))
    for line in sys.stdin:
        command = json.loads(line)
        _answer(lambda command=command: _do(command, state))


def _answer(work: Callable[[], dict[str, Any]]) -> None:
    try:
        answer = work()
    except BaseException as error:
        answer = {
            "failed": f"{type(error).__name__}: {error}"[:1500],
            "traceback": traceback.format_exc()[-2500:],
        }
    print("@" + json.dumps(answer), flush=True)


def _prepare(options: argparse.Namespace, name: str, state: dict[str, Any]) -> dict[str, Any]:
    import decoder_model as decoder
    import torch

    plain, graphs = decoder.split_name(name)
    implementation = plain.removeprefix("hf:")
    if not plain.startswith("hf:"):
        from attnlib.integrations.transformers import register

        register()
        implementation = "attnlib"
    began = time.monotonic()
    config = decoder.make_config(options.layers, **json.loads(options.config))
    model = decoder.make_model(config, options.device, getattr(torch, options.dtype))
    prompts = decoder.make_prompts(
        options.prompts, config.vocab_size, options.shortest, options.longest
    )
    pages = -(-(options.longest + options.max_new_tokens) // options.page_size)
    state.update(
        model=model,
        prompts=prompts,
        implementation=implementation,
        decoder=decoder,
        tokens=options.max_new_tokens,
    )
    state["settings"] = {
        "page_size": options.page_size,
        "num_blocks": (pages + 1) * options.prompts,
        "max_batch_tokens": options.max_batch_tokens,
        "graphs": graphs,
    }
    loaded = time.monotonic()
    decoder.generate(
        model, implementation, prompts, min(4, options.max_new_tokens), **state["settings"]
    )
    return {"load_s": loaded - began, "warm_up_s": time.monotonic() - loaded}


def _do(command: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """`time` generates and measures; `compare` compares the tokens with those of the reference."""
    import torch

    decoder, model, prompts = state["decoder"], state["model"], state["prompts"]
    on_gpu = next(model.parameters()).is_cuda
    if command["do"] == "compare":
        expected = json.loads(Path(command["reference"]).read_text())
        differences = decoder.compare(
            model, state["implementation"], prompts, state["tokens_of_run"], expected
        )
        return {
            "differences": differences,
            "same": len(prompts) - len(differences),
            "prompts": len(prompts),
        }
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    runs = [
        decoder.generate(
            model, state["implementation"], prompts, state["tokens"], **state["settings"]
        )
        for _ in range(2)
    ]
    best = max(runs, key=lambda run: run.tokens_per_second)
    state["tokens_of_run"] = best.tokens
    flat = [token for row in best.tokens for token in row]
    return {
        "tokens": best.tokens,
        "tokens_per_second": [run.tokens_per_second for run in runs],
        "ms_per_step": best.step_ms,
        "graphs": best.graphs,
        "repeats": runs[0].tokens == runs[1].tokens,
        "distinct_tokens": len(set(flat)) / max(len(flat), 1),
        "served_by": decoder.served_by(model)
        if state["implementation"] == "attnlib"
        else ["transformers " + state["implementation"]],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }


class Child:
    """The process of one backend, and its results."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.name, self.result = name, dict[str, Any]({"backend": name})
        environment = {key: value for key, value in os.environ.items() if key != "ATTNLIB_BACKEND"}
        if not name.startswith("hf:"):
            environment["ATTNLIB_BACKEND"] = name.partition("@")[0]
        command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--serve", name]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._log: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, seconds: float, **command: Any) -> bool:
        """Send a command (none for the first answer) and add the answer to `result`.

        False if it failed.
        """
        if "failed" in self.result:
            return False
        if command:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                self.result["failed"] = (
                    f"no answer within {seconds:.0f} s (--backend-seconds, --limit-seconds). "
                    + "".join(self._log)[-600:]
                )
                break
            if line.startswith("@"):
                self.result.update(json.loads(line[1:]))
                break
            if not line:
                self.result["failed"] = "the process ended. " + "".join(self._log)[-1500:]
                break
            self._log.append(line)
        return "failed" not in self.result

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def run(options: argparse.Namespace, arguments: list[str], folder: Path) -> list[dict[str, Any]]:
    """Run all backends, `--jobs` at a time; results are printed and written after each."""
    end = time.monotonic() + options.limit_seconds
    reference = folder / "decoder_tokens_reference.json"
    reference.unlink(missing_ok=True)
    results: list[dict[str, Any]] = []
    names = sorted(
        options.backends, key=lambda name: not name.startswith("hf:")
    )  # the reference comes first
    for first in range(0, len(names), options.jobs):
        children = [Child(name, arguments) for name in names[first : first + options.jobs]]

        def left() -> float:
            return max(1.0, min(options.backend_seconds, end - time.monotonic()))

        try:
            for child in children:
                child.ask(left())
            for child in children:
                if child.ask(left(), do="time"):
                    if child.name.startswith("hf:") and not reference.exists():
                        reference.write_text(json.dumps(child.result["tokens"]))
                        child.result["reference"] = True
                    elif reference.exists():
                        child.ask(left(), do="compare", reference=str(reference))
                results.append(child.result)
                show(child.result)
                save(options, results, folder)
        finally:
            for child in children:
                child.close()
    return results


def show(result: dict[str, Any]) -> None:
    """Print the result of one backend."""
    if "failed" in result:
        trace = result.get("traceback", "").strip().splitlines()[-12:]
        print(
            "\n    ".join([f"{result['backend']}: FAILED: {result['failed']}", *trace]), flush=True
        )
        return
    print(
        f"{result['backend']}: {max(result['tokens_per_second']):.0f} tokens/s, "
        f"{result['ms_per_step']:.2f} ms/step, graphs {result['graphs']}, "
        f"served by {', '.join(result['served_by'])}, load {result['load_s']:.0f} s, "
        f"warm-up {result['warm_up_s']:.0f} s, distinct tokens {result['distinct_tokens']:.2f}, "
        f"both runs equal: {result['repeats']}",
        flush=True,
    )
    for each in result.get("differences", []):
        numbers = " ".join(
            f"{key} {each[key]:.4f}"
            for key in ("margin", "top2", "error", "noise", "logit_std")
            if key in each
        )
        print(
            f"    prompt {each['prompt']:3} step {each['step']:3} "
            f"{'near tie' if each['explained'] else 'NOT EXPLAINED'}: {numbers}",
            flush=True,
        )


def table(results: list[dict[str, Any]]) -> str:
    """The results as one Markdown table."""
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    for result in results:
        if "failed" in result:
            rows.append(
                [
                    result["backend"],
                    "failed: " + result["failed"].strip().splitlines()[0][:200],
                    *["-"] * (len(COLUMNS) - 2),
                ]
            )
            continue
        differences = result.get("differences")
        near = sum(each["explained"] for each in differences or [])
        same = (
            "reference"
            if result.get("reference")
            else "not compared"
            if differences is None
            else f"{result['same']}/{result['prompts']}"
        )
        peak = "-" if result["peak_gib"] is None else f"{result['peak_gib']:.1f}"
        counts = ["-", "-"] if differences is None else [str(near), str(len(differences) - near)]
        rows.append(
            [
                result["backend"],
                ", ".join(result["served_by"]),
                same,
                *counts,
                f"{max(result['tokens_per_second']):.0f}",
                f"{result['ms_per_step']:.2f}",
                result["graphs"],
                peak,
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def save(options: argparse.Namespace, results: list[dict[str, Any]], folder: Path) -> None:
    from attnlib.bench.provenance import provenance

    versions = {
        "transformers": _version("transformers"),
        "flashinfer": _version("flashinfer-python"),
        "vllm_flash_attn": _version("vllm"),
    }
    content = {
        "provenance": {**provenance(), **versions},
        "settings": vars(options),
        "results": results,
    }
    (folder / "decoder_tokens.json").write_text(json.dumps(content, indent=1))


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a distribution"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=BACKENDS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--shortest", type=int, default=16, help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=int, default=700, help="tokens of the longest prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument(
        "--max-batch-tokens",
        type=int,
        default=2048,
        help="tokens of one step; longer prompts are processed in chunks",
    )
    parser.add_argument("--page-size", type=int, default=256)
    parser.add_argument(
        "--jobs",
        type=int,
        default=4,
        help="backends that load and warm up at once; each has its own copy of the model",
    )
    parser.add_argument(
        "--backend-seconds",
        type=float,
        default=150.0,
        help="time limit of one answer of one backend",
    )
    parser.add_argument("--limit-seconds", type=float, default=540.0, help="time limit of the run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--config", default="{}", help="JSON: fields of LlamaConfig to change")
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options, options.serve)
        return 0
    folder = Path(os.environ.get("OUT", "."))
    folder.mkdir(parents=True, exist_ok=True)
    results = run(options, sys.argv[1:], folder)
    text = table(results)
    (folder / "decoder_tokens.md").write_text(text + "\n")
    print("\n" + text, flush=True)
    wrong = [
        r["backend"]
        for r in results
        if "failed" in r or any(not each["explained"] for each in r.get("differences", []))
    ]
    print(
        "all backends give the tokens of the reference, except at near ties"
        if not wrong
        else f"wrong or failed: {', '.join(wrong)}",
        flush=True,
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
