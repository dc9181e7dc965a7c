"""Throughput of SGLang with one attention backend on one GPU: the model and the workloads of
`vllm_throughput.py`.

    python benchmarks/hosts/sglang_throughput.py --backend attnlib --page-size 64 \
        --workloads one short serve --out results.jsonl

Run it once per backend. Each workload appends one JSON object to --out. Decodes run in CUDA graphs
unless --eager is given; prefills do not. The radix cache is on, and only `deep` uses it. Engines
that share a GPU have --turns, as those of vLLM, and --cache-tokens. With
`--native` SGLang's own operations run as PyTorch code (`sglang_native.py`), for all backends alike.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_fa3 import LIBRARY
from sglang_plugins import prepare
from shapes import SHAPES
from turns import turn
from vllm_throughput import CAPTURED, lengths, prompts
from watch import Watch

WARM_UP = 4
"""New tokens of the call before each workload."""


class Engine:
    """SGLang with one attention backend. Arguments as of vLLM's."""

    def __init__(self, arguments: argparse.Namespace, watch: Watch) -> None:
        import sglang

        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(SHAPES["llama"]))
        self._turns, self._watch = arguments.turns, watch
        with turn(self._turns, watch, fcntl.LOCK_SH), watch.part("start"):
            start = time.perf_counter()
            self._engine = sglang.Engine(
                model_path=str(folder), load_format="dummy", skip_tokenizer_init=True,
                dtype="bfloat16", attention_backend=arguments.backend,
                page_size=arguments.page_size, kv_cache_dtype=arguments.kv_cache_dtype,
                context_length=32768, max_running_requests=128, chunked_prefill_size=8192,
                max_prefill_tokens=8192, mem_fraction_static=arguments.memory,
                max_total_tokens=arguments.cache_tokens, sampling_backend="pytorch",
                disable_decode_cuda_graph=arguments.eager, disable_prefill_cuda_graph=True,
                cuda_graph_bs_decode=CAPTURED, log_level="warning", random_seed=0,
            )  # fmt: skip
            self.start_s = time.perf_counter() - start

    def generate(self, given: list[dict[str, list[int]]], new_tokens: int) -> tuple[Any, float]:
        """Tokens of each prompt, and seconds."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        ids = [prompt["prompt_token_ids"] for prompt in given]
        name = f"call of {len(given)} prompts for {new_tokens} new tokens"
        with turn(self._turns, self._watch), self._watch.part(name):
            start = time.perf_counter()
            outputs = self._engine.generate(input_ids=ids, sampling_params=sampling)
            return [row["output_ids"] for row in outputs], time.perf_counter() - start

    def shutdown(self) -> None:
        """End the processes of the engine."""
        self._engine.shutdown()


def measure(engine: Engine, name: str, repetitions: int) -> dict[str, Any]:
    """The result of one workload; `s` is the best of the repetitions."""
    sizes, new = lengths(name)
    engine.generate(prompts(name, -1)[:2], WARM_UP)
    if name == "deep":
        given = prompts(name, 0)
        _, prefill = engine.generate(given, 1)
        engine.generate(given, 2)
        first_s = [engine.generate(given, 1)[1] for _ in range(repetitions)]
        calls = [engine.generate(given, new) for _ in range(repetitions)]
        steps = statistics.median(s for _, s in calls) - statistics.median(first_s)
        return {
            "prefill_s": prefill, "prefill_tokens_per_s": sum(sizes) / prefill,
            "steps_s": steps, "step_tokens_per_s": len(sizes) * (new - 1) / steps,
            "first_s": first_s, "all_s": [s for _, s in calls],
            "tokens": [row[:16] for row in calls[-1][0]],
        }  # fmt: skip
    calls = [engine.generate(prompts(name, repetition), new) for repetition in range(repetitions)]
    times = [seconds for _, seconds in calls]
    return {
        "s": min(times), "new_tokens_per_s": len(sizes) * new / min(times), "all_s": times,
        "tokens": [row[:16] for row in calls[0][0][:8]],
    }  # fmt: skip


def main() -> None:
    """Parse the command line and run the workloads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True, help="attnlib, triton, flashinfer, fa3")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--native", action="store_true", help="SGLang's operations in PyTorch")
    parser.add_argument("--workloads", nargs="+", default=["one", "short", "serve", "long", "deep"])
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--memory", type=float, default=0.8, help="share of the GPU's memory")
    parser.add_argument("--cache-tokens", type=int, help="of the cache; else all that fit")
    parser.add_argument("--turns", type=Path, help="file that engines lock while they generate")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    wanted = {"sglang_native": arguments.native, "sglang_fa3": os.environ.get(LIBRARY)}
    prepare(*(module for module, is_wanted in wanted.items() if is_wanted))
    import sglang
    import torch

    watch = Watch()
    engine = Engine(arguments, watch)
    common = {
        "backend": arguments.backend, "page_size": arguments.page_size,
        "mode": "eager" if arguments.eager else "graphs", "kv": arguments.kv_cache_dtype,
        "native": arguments.native,
        "sglang": sglang.__version__, "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(), "engine_start_s": round(engine.start_s, 1),
    }  # fmt: skip
    for name in arguments.workloads:
        with watch.part(name):
            result = measure(engine, name, arguments.repetitions)
        with arguments.out.open("a") as file:
            file.write(json.dumps({"workload": name, **common, **result}) + "\n")
        shown = {k: round(v, 3) for k, v in result.items() if isinstance(v, float)}
        print(name, arguments.backend, common["mode"], shown, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
