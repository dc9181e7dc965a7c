"""Throughput of vLLM with one attention backend on one GPU, over a Llama 3 8B shape, or another of
`shapes.py`, with random weights.

    python benchmarks/hosts/vllm_throughput.py --backend FLASH_ATTN --mode graphs \
        --workloads short serve long one deep --out results.jsonl

Run it once per backend. Each workload appends one JSON object to --out. Prompts are random token
ids. Prefix caching is on, and repetitions have prompts of their own; only `deep`, `long32k` and
`long64k` use it: their prompts are prefilled first, then decoded over the cached prefix. There
`decode_s` is the time of a call with all new tokens, which includes the admission of the prompts
(hashes of their blocks, last block computed again), and `steps_s` that time less the time of a call
with one new token: the decode steps alone.

`deep-uncached` has other prompts in every call, so that no prefix is cached. `decode_s` is the time
of a call with all new tokens less the time of a call with one: the requests whose prompts are
complete decode in the steps that prefill the others.

`calls` has the steps of each call: those with prefills (`mixed`; longer than LONG_STEP) and the
others, which only decode, with the number and the time of the slowest. `late` lists the kernels
that vLLM's monitor saw compiled, or found on disk, while the engine served; `engine_start_s` does
not include `import_s`, the import of vLLM. --start-parts writes where a start spends its time.
--profile writes what some steps of each workload spend their time on (`step_profile.py`), after it
is measured. The output names each part of the run (`watch.py`), and where one stalls.

Engines that run at once with one file as --turns make one call at a time, in turn, so that what
else happens to the machine happens to all, and no call while one of them starts; --cache-gib keeps
them from measuring its memory.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from shapes import SHAPES
from start_parts import StartParts
from step_profile import lines, profile_window
from turns import turn
from watch import Watch

for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

LONG_STEP = 0.06
"""Seconds. A step that prefills 8192 tokens of this model takes longer on an H100 or H200, a decode
of 32 requests of 16 000 tokens takes a third of it."""

CACHED = ("deep", "long32k", "long64k")
"""Workloads over cached prompts."""
CAPTURED = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]


def lengths(name: str) -> tuple[list[int], int]:
    """Prompt lengths and new tokens of a workload; the same in every run."""
    draw = random.Random(5)
    return {
        "short": ([draw.randint(100, 1000) for _ in range(128)], 128),
        "serve": ([draw.randint(200, 6000) for _ in range(64)], 128),
        "long": ([30000] * 8, 64),
        "one": ([2000], 128),
        "deep": ([16000] * 32, 256),
        "deep-uncached": ([16000] * 32, 256),
        "long32k": ([32768] * 16, 128),
        "long64k": ([65536] * 2, 128),
    }[name]


def prompts(name: str, repetition: int) -> list[dict[str, list[int]]]:
    """Random prompts of a workload."""
    draw = random.Random(f"{name} {repetition}")
    return [
        {"prompt_token_ids": [draw.randint(3, 31999) for _ in range(n)]} for n in lengths(name)[0]
    ]


class Lines(logging.Handler):
    """Lines of a logger.

    Args:
        name: of the logger.
        text: what they have in them.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__()
        self._text, self.lines = text, list[str]()
        log = logging.getLogger(name)
        log.addHandler(self)
        log.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        if self._text in (text := record.getMessage()):
            self.lines.append(text.split(". ")[0])


class Engine:
    """vLLM with one attention backend.

    Args:
        arguments: of `command_line`.
        watch: is told what the engine does.
    """

    def __init__(self, arguments: argparse.Namespace, watch: Watch) -> None:
        self._watch = watch
        start = time.perf_counter()
        with watch.part("import"):
            from vllm import LLM, SamplingParams

        self.import_s = time.perf_counter() - start
        folder = Path(tempfile.mkdtemp())
        model = {**SHAPES[arguments.shape], **json.loads(arguments.model)}
        (folder / "config.json").write_text(json.dumps(model))
        more: dict[str, Any] = {"block_size": arguments.block_size} if arguments.block_size else {}
        if arguments.mode != "eager":
            mode = {"graphs": "FULL_DECODE_ONLY", "full": "FULL"}[arguments.mode]
            sizes = [size * (1 + arguments.n_grams) for size in CAPTURED]
            more["compilation_config"] = {
                "mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes
            }  # fmt: skip
        if arguments.cache_gib:
            more["kv_cache_memory_bytes"] = int(arguments.cache_gib * 2**30)
        if arguments.n_grams:
            more["speculative_config"] = {
                "method": "ngram", "num_speculative_tokens": arguments.n_grams,
                "prompt_lookup_min": 2, "prompt_lookup_max": 4,
            }  # fmt: skip
        self.warm_ups = Lines("attnlib", "warmed up")
        self.late = Lines("vllm.utils.jit_monitor", " during inference: ")
        backend = _own_name() if arguments.backend == "CUSTOM" else arguments.backend
        if arguments.joined_write:
            _join_writes()
        self._turns, self.has_drafts = arguments.turns, arguments.n_grams > 0
        with turn(self._turns, watch, fcntl.LOCK_SH), watch.part("start"):
            parts = StartParts() if arguments.start_parts else None
            start = time.perf_counter()
            self.llm = LLM(
                model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
                enforce_eager=arguments.mode == "eager", max_model_len=arguments.max_model_len,
                max_num_seqs=128, max_num_batched_tokens=8192,
                gpu_memory_utilization=arguments.memory, attention_backend=backend,
                kv_cache_dtype=arguments.kv_cache_dtype, enable_prefix_caching=True,
                disable_log_stats=not arguments.n_grams, seed=0,
                tensor_parallel_size=arguments.gpus,
                decode_context_parallel_size=arguments.context_parallel,
                jit_monitor_mode=arguments.jit_monitor, **more,
            )  # fmt: skip
            self.start_s = time.perf_counter() - start
        self._sampling = SamplingParams
        self._ends: list[float] = []
        self._time_steps()
        if parts is not None:
            parts.write(arguments.start_parts)

    def _time_steps(self) -> None:
        """Record when each step of the engine ends."""
        engine, step = self.llm.llm_engine, self.llm.llm_engine.step

        def timed() -> Any:
            outputs = step()
            self._ends.append(time.perf_counter())
            return outputs

        engine.step = timed

    def generate(self, given: list[Any], new_tokens: int, **more: Any) -> tuple[list[Any], float]:
        """Outputs and seconds."""
        sampling = self._sampling(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **more
        )
        name = f"call of {len(given)} prompts for {new_tokens} new tokens"
        self._ends.clear()
        with turn(self._turns, self._watch), self._watch.part(name, self._state):
            self._ends.append(start := time.perf_counter())
            outputs = self.llm.generate(given, sampling, use_tqdm=False)
            return outputs, time.perf_counter() - start

    def _state(self) -> str:
        unfinished = self.llm.llm_engine.get_num_unfinished_requests()
        return f"{max(0, len(self._ends) - 1)} steps, {unfinished} requests unfinished"

    def cache_tokens(self) -> int:
        """Tokens that the cache holds."""
        config = self.llm.llm_engine.vllm_config.cache_config
        return int(config.num_gpu_blocks * config.block_size)

    def drafts(self) -> dict[str, int]:
        """Tokens that were drafted and accepted so far."""
        names = {"vllm:spec_decode_num_draft_tokens": "drafted",
                 "vllm:spec_decode_num_accepted_tokens": "accepted"}  # fmt: skip
        metrics = self.llm.get_metrics()
        return {names[m.name]: m.value for m in metrics if m.name in names}

    def steps(self) -> dict[str, Any]:
        """Number and seconds of the steps of the last call, with prefills and without."""
        times = [b - a for a, b in pairwise(self._ends)]
        mixed = [seconds for seconds in times if seconds > LONG_STEP]
        decodes = [(seconds, step) for step, seconds in enumerate(times) if seconds <= LONG_STEP]
        sums = [seconds for seconds, _ in decodes]
        return {
            "mixed": len(mixed), "mixed_s": round(sum(mixed), 4), "decodes": len(decodes),
            "decodes_s": round(sum(sums), 4),
            "median_decode_s": round(statistics.median(sums), 6) if decodes else None,
            "slowest": [[step, round(s, 4)] for s, step in sorted(decodes, reverse=True)[:6]],
        }  # fmt: skip


def _own_name() -> str:
    """The name of attnlib, which this process does not know before plug-ins are loaded."""
    from vllm.plugins import load_general_plugins

    from attnlib.integrations.vllm.names import backend_name

    load_general_plugins()
    return backend_name()


def _join_writes() -> None:
    """Let attnlib write keys and values inside attention, to measure what a call of its own costs
    or saves."""
    from vllm.forward_context import get_forward_context

    from attnlib.integrations.vllm import backend, impl

    attend = impl.AttnlibImpl.forward

    def write_and_attend(self: Any, layer: Any, *given: Any, **named: Any) -> Any:
        _query, key, value, memory = given[:4]
        slots = get_forward_context().slot_mapping.get(layer.layer_name)
        if slots is not None:
            self.do_kv_cache_update(layer, key, value, memory, slots)
        return attend(self, layer, *given, **named)

    backend.AttnlibBackend.forward_includes_kv_cache_update = True
    impl.AttnlibImpl.forward = write_and_attend  # type: ignore[method-assign]


def measure(engine: Engine, name: str, repetitions: int) -> dict[str, Any]:
    """The result of one workload; times are the best of the repetitions."""
    sizes, new = lengths(name)
    given, decoded = prompts(name, 0), len(sizes) * new
    engine.generate(prompts(name, -1)[:2], 4)
    if name in CACHED:
        _, prefill = engine.generate(given, 1)
        engine.generate(given, 2)  # compiles what only cached prefixes need
        first_s, all_s = [], []
        for _ in range(repetitions):
            first_s.append(engine.generate(given, 1)[1])
            outputs, seconds = engine.generate(given, new)
            all_s.append(seconds)
        decode, steps = min(all_s), statistics.median(all_s) - statistics.median(first_s)
        return {
            "prefill_s": prefill, "prefill_tokens_per_s": sum(sizes) / prefill,
            "decode_s": decode, "decode_tokens_per_s": decoded / decode,
            "steps_s": steps, "step_tokens_per_s": len(sizes) * (new - 1) / steps,
            "first_s": first_s, "all_s": all_s,
            "tokens": [list(o.outputs[0].token_ids)[:16] for o in outputs],
        }  # fmt: skip
    if name == "deep-uncached":
        first_s, all_s, calls = [], [], []
        for repetition in range(repetitions + 1):  # each takes 15 to 20 s
            single = repetition % 3 == 0
            seconds = engine.generate(prompts(name, repetition), 1 if single else new)[1]
            (first_s if single else all_s).append(seconds)
            calls.append({"new_tokens": 1 if single else new, "s": seconds, **engine.steps()})
            print(name, repetition, calls[-1], flush=True)
        decode = statistics.median(all_s) - statistics.median(first_s)
        return {
            "prefill_s": min(first_s), "prefill_tokens_per_s": sum(sizes) / min(first_s),
            "decode_s": decode, "decode_tokens_per_s": len(sizes) * (new - 1) / decode,
            "first_s": first_s, "all_s": all_s, "calls": calls,
        }  # fmt: skip
    times, calls = [], []
    for repetition in range(repetitions):
        times.append(engine.generate(prompts(name, repetition), new)[1])
        calls.append(engine.steps())
    tokens_per_s = decoded / min(times)
    return {"s": min(times), "new_tokens_per_s": tokens_per_s, "all_s": times, "calls": calls}


def profile(engine: Engine, name: str) -> Iterator[dict[str, Any]]:
    """The windows of a workload: its first steps, which prefill, and steps that only decode.
    Prompts of `CACHED` are prefilled before. With drafts a call has fewer steps than new tokens."""
    new, numbers = lengths(name)[1], count(100)
    decodes = (12, 8) if engine.has_drafts else (max(8, new // 2), 32)
    windows = [(2, 12)] if name in CACHED else [(0, 8), decodes]
    if name in CACHED:
        engine.generate(prompts(name, 0), 1)

    def generate() -> None:
        given = prompts(name, 0 if name in CACHED else next(numbers))
        engine.generate(given, new if engine.has_drafts else min(new, sum(windows[-1]) + 24))

    for window in windows:
        yield profile_window(engine.llm, generate, *window)


def command_line() -> argparse.ArgumentParser:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True, help="FLASH_ATTN, or CUSTOM for attnlib")
    parser.add_argument("--mode", choices=("eager", "graphs", "full"), default="graphs")
    workloads = ["short", "serve", "long", "one", "deep"]
    parser.add_argument("--workloads", nargs="*", default=workloads, help="none: only the start")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--cache-gib", type=float, help="of keys and values; else all that is free")
    parser.add_argument("--turns", type=Path, help="file that engines lock while they generate")
    parser.add_argument("--model", default="{}", help="JSON: changes to the model's config")
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--block-size", type=int, help="tokens of a block; vLLM's default")
    parser.add_argument("--n-grams", type=int, default=0, help="drafted tokens of each step")
    parser.add_argument("--gpus", type=int, default=1, help="tensor parallelism")
    parser.add_argument("--context-parallel", type=int, default=1, help="ranks that share a cache")
    monitor = "what vLLM does when a kernel is compiled while it serves"
    parser.add_argument("--jit-monitor", choices=("warn", "error"), default="warn", help=monitor)
    joined = "attnlib writes keys and values inside attention"
    parser.add_argument("--joined-write", action="store_true", help=joined)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--start-parts", type=Path, help="JSON: what a start spends its time on")
    parser.add_argument("--profile", type=Path, help="JSON lines: what steps do")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def main() -> None:
    """Run the workloads."""
    arguments = command_line().parse_args()
    import torch
    import vllm

    watch = Watch()
    engine = Engine(arguments, watch)
    print(f"engine up after {engine.start_s:.1f} s", flush=True)
    common = {
        "backend": arguments.backend, "mode": arguments.mode, "kv": arguments.kv_cache_dtype,
        "shape": arguments.shape, "n_grams": arguments.n_grams, "joined": arguments.joined_write,
        "gpus": arguments.gpus, "context_parallel": arguments.context_parallel,
        "vllm": vllm.__version__, "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "all"),
        "engine_start_s": round(engine.start_s, 2), "import_s": round(engine.import_s, 2),
        "cache_tokens": engine.cache_tokens(), "warm_ups": engine.warm_ups.lines,
    }  # fmt: skip
    if not arguments.workloads:
        with arguments.out.open("a") as file:
            file.write(json.dumps({"workload": None, **common}) + "\n")
    for name in arguments.workloads:
        with watch.part(name):
            result = measure(engine, name, arguments.repetitions)
        if arguments.n_grams:
            result.update(engine.drafts())
        with arguments.out.open("a") as file:
            row = {"workload": name, **common, "late": engine.late.lines, **result}
            file.write(json.dumps(row) + "\n")
        shown = {k: round(v, 3) for k, v in result.items() if isinstance(v, float)}
        print(name, arguments.backend, arguments.mode, arguments.kv_cache_dtype, shown, flush=True)
        if arguments.profile:
            with arguments.profile.open("a") as file, watch.part(f"profile of {name}"):
                for window in profile(engine, name):
                    row = {"workload": name, **common, **window}
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    print(*lines([row]), sep="\n", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
