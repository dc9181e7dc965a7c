"""Tokens per second of transformers on a GPU with attnlib and with other implementations.

    python benchmarks/gpu/generate.py --out results.json
    python benchmarks/gpu/generate.py --models llama-8b gemma3-4b --few-layers --rows 8x8000+32
    python benchmarks/gpu/generate.py --cells "gpt-oss-20b 1x1000+64" "llama-8b 8x8000+32"

Decoders with random bfloat16 weights continue random prompts. A row is requests x prompt tokens +
new tokens:

    padded      the prompts of a batch have other lengths, with padding on the left
    static      `generate` over a static cache, not compiled
    compiled    `generate` over a static cache, as transformers compiles it by itself
    batch       `generate_batch`

Each implementation runs a row once, which compiles and captures; then `--rounds` runs are timed,
fewer where they take longer than `--seconds` together. Implementations take turns: after each token
where nothing is compiled (`attnlib.bench.token_turns`), after each run of compiled models
(`process_turns`; with `--together` all their processes start at once, and no row is timed before
all are ready). In `generate_batch` they run one after the other, because each cache takes the free
memory. Tokens per second follow from medians over the rounds (of each token where these take
turns); `ratio` is attnlib's speed to that of the other: of these medians, or the median over the
runs. `token_ms` is the median of a decode, `first_ms` that of the first decode of a call, and
`prefill_ms` what comes before it. `compiled` counts the kernels of Triton that the timed runs
compile, `graphs` and `breaks` what torch.compile made in the first run, `new_graphs` in the timed
ones. sdpa runs as `paged|sdpa` in `generate_batch`; models with sinks are compared with eager
instead of sdpa.

Each row is printed and written when it ends. After `--limit` seconds no row and no first run
begins, and a compiled model that is not ready then is left out.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from process_turns import ProcessRun
from torch._dynamo.utils import counters
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

import attnlib.integrations.transformers as integration
from attnlib.bench.provenance import provenance
from attnlib.bench.token_turns import TokenTurns
from attnlib.testing.compilations import compiled_kernels

VOCABULARY = 32000


@dataclass(frozen=True)
class Model:
    """A decoder: its config class, its sizes, and its layers with `--few-layers`."""

    config: str
    sizes: dict[str, Any]
    few_layers: int


def _llama(hidden: int, inner: int, layers: int, head_size: int) -> Model:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": head_size,
    }
    return Model("LlamaConfig", sizes, 8)


MODELS = {
    "llama-1b": _llama(2048, 8192, 16, 64),
    "llama-8b": _llama(4096, 14336, 32, 128),
    "gemma3-4b": Model(
        "Gemma3TextConfig",
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
        },
        12,
    ),
    "gpt-oss-20b": Model("GptOssConfig", {"num_hidden_layers": 24}, 6),
}


@dataclass(frozen=True)
class Row:
    """One workload.

    Attributes:
        requests, prompt, tokens: requests, tokens of the longest prompt, new tokens.
        shortest: tokens of the shortest prompt; None where all are equal.
        arguments: further arguments of `generate`.
        run: "turns", "compiled" or "batch".
    """

    requests: int
    prompt: int
    tokens: int
    shortest: int | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    run: str = "turns"


_STATIC = (("cache_implementation", "static"),)
ROWS = {
    "1x1000+64": Row(1, 1000, 64),
    "16x1000+64 padded": Row(16, 1000, 64, 500),
    "8x8000+32": Row(8, 8000, 32),
    "1x1000+64 static": Row(1, 1000, 64, None, (*_STATIC, ("disable_compile", True))),
    "1x1000+64 compiled": Row(1, 1000, 64, None, _STATIC, "compiled"),
    "16x1000+64 padded compiled": Row(16, 1000, 64, 500, _STATIC, "compiled"),
    "32x50..2000+32 batch": Row(32, 2000, 32, 50, (), "batch"),
    "64x50..2000+64 batch": Row(64, 2000, 64, 50, (), "batch"),
}


def build_model(name: str, few_layers: bool) -> Any:
    """A decoder on the GPU; no token ends a sequence."""
    torch.manual_seed(0)
    shape = MODELS[name]
    sizes = shape.sizes | ({"num_hidden_layers": shape.few_layers} if few_layers else {})
    config = getattr(transformers, shape.config)(
        **sizes,
        vocab_size=VOCABULARY,
        max_position_embeddings=16384,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt_lengths(row: Row) -> list[int]:
    """Tokens of each prompt, the longest first."""
    if row.shortest is None:
        return [row.prompt] * row.requests
    step = (row.prompt - row.shortest) / max(1, row.requests - 1)
    return [round(row.prompt - step * index) for index in range(row.requests)]


def build_batch(row: Row) -> dict[str, torch.Tensor]:
    """Random prompts of a row, padded on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (row.requests, row.prompt), generator=generator)
    columns = torch.arange(row.prompt)
    mask = torch.stack([columns >= row.prompt - length for length in prompt_lengths(row)])
    return {"input_ids": (ids * mask).cuda(), "attention_mask": mask.long().cuda()}


def run_generate(model: Any, name: str, row: Row, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tokens of one greedy `generate`."""
    model.set_attn_implementation(name)
    found: torch.Tensor = model.generate(
        **batch, max_new_tokens=row.tokens, do_sample=False, **dict(row.arguments)
    )
    return found[:, row.prompt :]


def run_batch(model: Any, name: str, row: Row, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tokens of one greedy `generate_batch`; its cache and graphs are kept for the next."""
    paged = f"paged|{name}"
    known = transformers.AttentionInterface._global_mapping
    model.set_attn_implementation(paged if name == "sdpa" and paged in known else name)
    prompts = [
        ids[mask > 0].tolist()
        for ids, mask in zip(batch["input_ids"].cpu(), batch["attention_mask"].cpu(), strict=True)
    ]
    # Shared blocks would let a second run skip its prompts.
    settings: dict[str, Any] = {"allow_block_sharing": False}
    if hasattr(transformers.ContinuousBatchingConfig(), "auto_switch_to_flash"):
        settings["auto_switch_to_flash"] = False
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=row.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**settings),
        persistent_manager=True,
        progress_bar=False,
    )
    keys = sorted(outputs, key=lambda key: int(key.rpartition("_")[2]))
    made = [outputs[key].generated_tokens for key in keys]
    if len(made) != row.requests or any(len(tokens) != row.tokens for tokens in made):
        errors = {output.error for output in outputs.values()}
        raise RuntimeError(f"{len(made)} of {row.requests} requests were finished: {errors}")
    return torch.tensor(made)


def timed(run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Seconds of a call, and its tokens."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    tokens = run()
    torch.cuda.synchronize()
    return time.perf_counter() - started, tokens.cpu()


def parts_of(turns: Sequence[Sequence[float]]) -> dict[str, float]:
    """Milliseconds of the parts of a run.

    Args:
        turns: of each run, the seconds before its first decode, of the first decode, and of each
            further one.
    """
    prefill, first, *others = (statistics.median(turn) * 1e3 for turn in zip(*turns, strict=True))
    found = {"prefill_ms": prefill, "first_ms": first, "token_ms": statistics.median(others)}
    return {name: round(value, 3) for name, value in found.items()}


class Stopwatch:
    """A run of `generate` whose parts are timed: it asks its model for the inputs of each forward.

    Attributes:
        turns: of each run, the seconds up to the first decode, and of each decode.
    """

    def __init__(self, model: Any, run: Callable[[], torch.Tensor]) -> None:
        self.turns: list[list[float]] = []
        self._run, self._prepare = run, model.prepare_inputs_for_generation
        model.prepare_inputs_for_generation = self._prepared

    def __call__(self) -> torch.Tensor:
        self._times = [time.perf_counter()]
        found = self._run()
        self._note()
        # The first forward is the prefill: what comes before it is a part of it.
        begin, _, *times = self._times
        self.turns.append([end - start for start, end in zip([begin, *times], times, strict=False)])
        return found

    def _prepared(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self._prepare(*args, **kwargs)

    def _note(self) -> None:
        torch.cuda.synchronize()
        self._times.append(time.perf_counter())


def release(model: Any) -> None:
    """Free what an implementation has compiled, captured or allocated."""
    destroy = getattr(model, "destroy_cached_continuous_batching_manager", None)
    if destroy is not None:
        destroy()
    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    torch.cuda.empty_cache()


class Measurement:
    """One implementation in one row: its first run, then timed ones."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        """Run once.

        Args:
            run: returns the tokens `[requests, tokens]`.
        """
        self.run = run
        self.seconds: list[float] = []
        self.total: float | None = None
        self.parts: dict[str, float] = {}
        self.compiled = self.new_graphs = 0
        counters.clear()
        self._first, self.tokens = timed(run)
        self._graphs = counters["stats"]["unique_graphs"]
        self._breaks = sum(counters["graph_break"].values())

    def repeat(self) -> None:
        """One timed run."""
        counters.clear()
        with compiled_kernels() as compiled:
            seconds, self.tokens = timed(self.run)
        self.seconds.append(seconds)
        self.compiled += len(compiled)
        self.new_graphs += counters["stats"]["unique_graphs"]
        if isinstance(self.run, Stopwatch):
            self.parts = parts_of(self.run.turns[-len(self.seconds) :])

    def result(self, reference: torch.Tensor, ours: Measurement | None) -> dict[str, Any]:
        """The figures.

        Args:
            reference: tokens of the first implementation, for the share of equal ones.
            ours: attnlib's measurement, for the ratio; None for none.
        """
        # With random weights, rounding decides near ties, so that later tokens may differ.
        equal = (self.tokens == reference).cummin(1).values.float().mean().item()
        total = self.total or statistics.median(self.seconds)
        found = {
            "tokens_per_s": self.tokens.numel() / total,
            "seconds": [round(value, 5) for value in self.seconds],
            **self.parts,
            "first_run_s": self._first,
            "compiled": self.compiled,
            "graphs": self._graphs,
            "breaks": self._breaks,
            "new_graphs": self.new_graphs,
            "equal_tokens": equal,
        }
        if ours is not None and ours.total is not None:
            found["ratio"] = total / ours.total
        elif ours is not None:
            pairs = zip(self.seconds, ours.seconds, strict=False)
            found["ratio"] = statistics.median(other / mine for other, mine in pairs)
        return found


def repeat(measurements: Sequence[Measurement | ProcessRun], rounds: int, limit: float) -> None:
    """Timed runs in turn; no further round after `limit` seconds."""
    started = time.perf_counter()
    for turn in range(rounds):
        for measurement in measurements[:: -1 if turn % 2 else 1]:
            measurement.repeat()
        if time.perf_counter() - started > limit:
            break


def repeat_by_token(
    model: Any, measured: dict[str, Measurement], rounds: int, limit: float
) -> None:
    """Timed runs that take turns token by token."""
    turns = TokenTurns(model, {name: measured[name].run for name in measured})
    try:
        turns.round()  # the threads make their plans
        for seconds in turns.seconds.values():
            seconds.clear()
        started = time.perf_counter()
        with compiled_kernels() as compiled:
            for _ in range(rounds):
                turns.round()
                if time.perf_counter() - started > limit:
                    break
    finally:
        turns.close()
    for name, measurement in measured.items():
        measurement.total, measurement.compiled = turns.total(name), len(compiled)
        measurement.seconds = [sum(seconds) for seconds in turns.seconds[name]]
        rounds_of = turns.seconds[name]  # the first three turns come before the first decode
        measurement.parts = parts_of([[sum(each[:3]), *each[3:]] for each in rounds_of])
        measurement.tokens = turns.tokens[name].cpu()


def measurement_of(name: str, few_layers: bool, label: str, implementation: str) -> Measurement:
    """The first run of an implementation in a process of its own."""
    integration.register()
    transformers.logging.set_verbosity_error()
    model, row = build_model(name, few_layers), ROWS[label]
    batch = build_batch(row)
    made = Measurement(Stopwatch(model, lambda: run_generate(model, implementation, row, batch)))
    torch.cuda.empty_cache()  # what compilation took: other processes wait for memory
    return made


class CompiledRow:
    """The implementations of a row of compiled models, each in a process that starts at once.

    Args:
        make: starts the process of an implementation.
        names: the implementations.
    """

    def __init__(self, make: Callable[[str], ProcessRun], names: list[str]) -> None:
        self._runs, self._errors = {name: make(name) for name in names}, {}
        self._waits = list(names)

    def wait(self, seconds: float) -> None:
        """Wait until each process is ready; end those that failed or take longer."""
        end = time.perf_counter() + seconds
        while self._waits:
            name = self._waits.pop()
            try:
                self._runs[name].ready(max(0.0, end - time.perf_counter()))
            except RuntimeError as error:
                self._errors[name] = {"error": str(error)}
                self._runs.pop(name).end()

    def measure(
        self, rounds: int, limit: float, left: float
    ) -> tuple[dict[str, Measurement], dict[str, Any]]:
        """As the function `measure`; no process is waited for longer than `left`."""
        found = {}
        try:
            self.wait(left)
            repeat(list(self._runs.values()), rounds, limit)
            for name, run in self._runs.items():
                found[name] = Measurement.__new__(Measurement)
                vars(found[name]).update(run.close())
        finally:
            self.end()
        return found, self._errors

    def end(self) -> None:
        """End the processes."""
        for run in self._runs.values():
            run.end()


def measure(
    model: Any, row: Row, names: list[str], rounds: int, limit: float = 1e9, left: float = 1e9
) -> tuple[dict[str, Measurement], dict[str, Any]]:
    """Timed runs of each implementation in a row, and errors by implementation.

    Args:
        model, row: what runs.
        names: the implementations.
        rounds: timed runs of each.
        limit: seconds after which no further round begins.
        left: seconds after which no further first run begins.
    """
    batch, errors = build_batch(row), {}
    end = time.perf_counter() + left
    run = run_batch if row.run == "batch" else run_generate
    measured: dict[str, Measurement] = {}
    for name in names:
        if row.run == "batch":
            release(model)
        if time.perf_counter() > end:
            errors[name] = {"error": "the time limit"}
            continue
        try:
            measured[name] = Measurement(lambda name=name: run(model, name, row, batch))
            if row.run == "batch":
                repeat([measured[name]], rounds, limit / len(names))
        except Exception as error:  # an implementation that is not installed, memory, a refusal
            measured.pop(name, None)
            errors[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    if row.run == "turns" and measured:
        try:
            repeat_by_token(model, measured, rounds, limit)
        except Exception as error:  # such as no memory: the other rows run
            errors |= dict.fromkeys(measured, {"error": f"{type(error).__name__}: {error}"[:300]})
            measured.clear()
    release(model)
    return measured, errors


def installed() -> list[str]:
    """The implementations that run without another wish."""
    found = {
        "flash_attention_2": is_flash_attn_2_available(),
        "flash_attention_3": is_flash_attn_3_available(),
    }
    return ["sdpa", "eager", *(name for name, here in found.items() if here), "attnlib"]


def options() -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["llama-1b"], choices=MODELS)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    cells = [f"{model} {row}" for model in MODELS for row in ROWS]
    parser.add_argument(
        "--cells",
        nargs="+",
        choices=cells,
        metavar="'MODEL ROW'",
        help="these, in this order, instead of all --rows of all --models",
    )
    parser.add_argument(
        "--implementations",
        nargs="+",
        default=installed(),
        help="default: attnlib, sdpa or, for models without it, eager, FlashAttention if installed",
    )
    parser.add_argument("--few-layers", action="store_true", help="fewer layers than the model has")
    parser.add_argument(
        "--together",
        action="store_true",
        help="compile all compiled rows at once, before the first row",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="for the timed runs of a row")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds for all rows")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--commit", help="of attnlib, for copies without history")
    given = parser.parse_args()
    given.cells = given.cells or [f"{model} {row}" for model in given.models for row in given.rows]
    given.eager_too = given.implementations != parser.get_default("implementations")
    return given


def names_of(model: Any, given: argparse.Namespace) -> list[str]:
    """The implementations that run a model."""
    names = list(given.implementations)
    if model._supports_sdpa and not given.eager_too:
        names.remove("eager")
    if not model._supports_sdpa and "sdpa" in names:
        names.remove("sdpa")
    return names


def main() -> None:
    given = options()
    integration.register()
    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {}
    started = time.perf_counter()
    build = functools.cache(lambda name: build_model(name, given.few_layers))

    def start(cell: str) -> CompiledRow:
        name, _, label = cell.partition(" ")
        make = functools.partial(ProcessRun, measurement_of, name, given.few_layers, label)
        return CompiledRow(make, names_of(build(name), given))

    def left() -> float:
        return given.limit - (time.perf_counter() - started)

    compiled = [cell for cell in given.cells if ROWS[cell.partition(" ")[2]].run == "compiled"]
    waiting = {cell: start(cell) for cell in compiled if given.together}
    try:
        for each in waiting.values():
            each.wait(left())
        for cell in given.cells:
            name, _, label = cell.partition(" ")
            if left() <= 0:
                print(f"{cell} and later rows: not run: {given.limit:.0f} s passed", flush=True)
                break
            limits = given.rounds, given.seconds, left()
            if cell in compiled:
                measured, found = (waiting.get(cell) or start(cell)).measure(*limits)
            else:
                names = names_of(build(name), given)
                measured, found = measure(build(name), ROWS[label], names, *limits)
            ours = measured.get("attnlib")
            for each_name, measurement in measured.items():
                reference = next(iter(measured.values())).tokens
                counted = None if each_name == "attnlib" else ours
                found[each_name] = measurement.result(reference, counted)
            results[cell] = found
            print(cell, json.dumps(found), flush=True)
            if given.out:  # after each row, so that a stopped run keeps the rows before
                facts = provenance(commit=given.commit)
                facts |= {"transformers": transformers.__version__}
                given.out.write_text(json.dumps({**facts, "rows": results}, indent=1) + "\n")
    finally:
        for each in waiting.values():
            each.end()


if __name__ == "__main__":
    main()
