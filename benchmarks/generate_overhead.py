"""Speed of transformers with attnlib and with other implementations, on one CPU thread.

    python benchmarks/generate_overhead.py --record
    python benchmarks/generate_overhead.py --rows "static cache" "soft cap, prefill" --rounds 5

Random float32 decoders continue prompts of up to 512 tokens by 64 tokens: `generate` over a
`DynamicCache` and over a static cache, with and without left padding, and `generate_batch`. They
are a Llama of 4 layers with hidden size 512, one of 8 layers with 32 million weights, and a Gemma 2
shape, whose scores have a soft cap: it is compared with eager, because sdpa has none. Gemma 3 270M
has its own weights (`attnlib[model]`) and makes 24 tokens. Prefills of 1024 tokens are rows of
their own; one of them has a mask of eight documents.

The implementations take turns in one process. Rows of `generate` change turns after each token
(`attnlib.bench.token_turns`); what is reported follows from the median time of each token over the
rounds. Time runs from the first decode. Two runs of one implementation differ by up to 3% in all
rounds of their threads, so the threads are new after `ROUNDS` rounds, and start in turn. Other rows
change turns after each run, and the median over the rounds of the ratios of neighbors is reported.
Seconds are CPU time, so that other processes do not count.

`--record` adds the rows to benchmarks/results/generate_overhead.json, and removes those of other
commits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import attnlib.integrations.transformers as integration
from attnlib import example_model
from attnlib.bench.provenance import provenance
from attnlib.bench.token_turns import TokenTurns

RESULTS = Path(__file__).parent / "results" / "generate_overhead.json"
PROMPT, NEW_TOKENS, PREFILL, DOCUMENT = 512, 64, 1024, 128
PADDED = (512, 480, 400, 256)
ROUNDS = 4
"""Of one pair of threads."""


@dataclass(frozen=True)
class Row:
    """One workload.

    Attributes:
        model: "llama", "llama-32m", "gemma2" or "gemma3-270m".
        other: the implementation that attnlib is compared with.
        lengths: tokens of each prompt.
        run: "generate", "prefill", "documents" or "batch".
        new_tokens: tokens that `generate` makes after the first one.
        arguments: further arguments of `generate`.
    """

    model: str = "llama"
    other: str = "sdpa"
    lengths: tuple[int, ...] = (PROMPT,)
    run: str = "generate"
    new_tokens: int = NEW_TOKENS
    arguments: dict[str, Any] = field(default_factory=dict)


STATIC = {"cache_implementation": "static"}
ROWS = {
    "batch 1": Row(),
    "batch 4, padded": Row(lengths=PADDED),
    "static cache": Row(arguments=STATIC),
    "static cache, padded": Row(lengths=PADDED, arguments=STATIC),
    "generate_batch": Row(lengths=(*PADDED, 40, 130, 300, 64), run="batch"),
    "prefill": Row(lengths=(PREFILL,), run="prefill"),
    "prefill, mask of documents": Row(lengths=(PREFILL,), run="documents"),
    "32M Llama": Row(model="llama-32m"),
    "32M Llama, static cache": Row(model="llama-32m", arguments=STATIC),
    "soft cap": Row(model="gemma2", other="eager"),
    "soft cap, padded": Row(model="gemma2", other="eager", lengths=PADDED),
    "soft cap, prefill": Row(model="gemma2", other="eager", lengths=(PREFILL,), run="prefill"),
    "Gemma 3 270M": Row(model="gemma3-270m", new_tokens=24),
    "Gemma 3 270M, padded": Row(model="gemma3-270m", lengths=PADDED, new_tokens=24),
    "Gemma 3 270M, static cache": Row(model="gemma3-270m", new_tokens=24, arguments=STATIC),
}


def build_model(name: str) -> Any:
    """The model in evaluation mode; no token ends a sequence."""
    if name == "gemma3-270m":
        model = transformers.AutoModelForCausalLM.from_pretrained(
            example_model.checkpoint(), dtype=torch.float32
        )
        model.generation_config.eos_token_id = None
        return model
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    if name == "llama-32m":
        sizes |= {"num_hidden_layers": 8, "vocab_size": 6400}
    if name != "gemma2":
        config: Any = transformers.LlamaConfig(**sizes, num_key_value_heads=8)
    else:
        config = transformers.Gemma2Config(
            **sizes, num_key_value_heads=4, head_dim=64, query_pre_attn_scalar=64
        )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def build_batch(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Random prompts with left padding: `input_ids` and `attention_mask`, `[B, T]`."""
    generator, longest = torch.Generator().manual_seed(0), max(lengths)
    ids = torch.randint(1, 1024, (len(lengths), longest), generator=generator)
    columns = torch.arange(longest)
    mask = torch.stack([columns >= longest - length for length in lengths]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def seconds(call: Callable[[], Any]) -> float:
    """CPU time of a call."""
    started = time.process_time()
    call()
    return time.process_time() - started


def generate_rates(
    model: Any, row: Row, batch: dict[str, torch.Tensor], rounds: int
) -> dict[str, float]:
    """Decoded tokens per second of greedy `generate` with each implementation."""

    def run() -> torch.Tensor:
        found: torch.Tensor = model.generate(
            **batch, max_new_tokens=row.new_tokens + 1, do_sample=False, **row.arguments
        )
        return found

    names = "attnlib", row.other
    used = dict.fromkeys(names, 0.0)
    for group in range(-(-rounds // ROUNDS)):
        order = names[:: -1 if group % 2 else 1]
        turns = TokenTurns(model, dict.fromkeys(order, run), time.thread_time)
        try:
            turns.round()  # makes plans
            for seconds_of in turns.seconds.values():
                seconds_of.clear()
            for _ in range(count := min(ROUNDS, rounds - group * ROUNDS)):
                turns.round()
        finally:
            turns.close()
        for name in names:
            used[name] += count * turns.total(name, first=3)
    tokens = row.new_tokens * len(row.lengths) * rounds
    return {name: tokens / seconds for name, seconds in used.items()}


@torch.no_grad()
def prefill_rate(model: Any, row: Row, batch: dict[str, torch.Tensor]) -> float:
    """Prompt tokens per second of a forward without a cache."""
    return sum(row.lengths) / seconds(lambda: model(**batch, use_cache=False, logits_to_keep=1))


@torch.no_grad()
def documents_rate(model: Any, row: Row, batch: dict[str, torch.Tensor]) -> float:
    """The same with a mask `[1, 1, T, T]` that separates documents of `DOCUMENT` tokens."""
    places = torch.arange(row.lengths[0])
    own = places[:, None] // DOCUMENT == places // DOCUMENT
    mask = (own & (places[:, None] >= places))[None, None]
    given = {"input_ids": batch["input_ids"], "position_ids": places[None] % DOCUMENT}
    used = seconds(lambda: model(**given, attention_mask=mask, use_cache=False, logits_to_keep=1))
    return row.lengths[0] / used


def batch_rate(model: Any, row: Row, batch: dict[str, torch.Tensor]) -> float:
    """Tokens per second of greedy `generate_batch`, prompts included in the time."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    inputs = [ids[mask > 0].tolist() for ids, mask in pairs]
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    paged = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    used = seconds(
        lambda: model.generate_batch(
            inputs=inputs,
            generation_config=settings,
            continuous_batching_config=paged,
            progress_bar=False,
        )
    )
    return NEW_TOKENS * len(inputs) / used


RATES = {
    "prefill": prefill_rate,
    "documents": documents_rate,
    "batch": batch_rate,
}


def run_rates(
    model: Any, row: Row, batch: dict[str, torch.Tensor], rounds: int
) -> dict[str, list[float]]:
    """Tokens per second of each run, with attnlib and with the other implementation."""
    found: dict[str, list[float]] = {"attnlib": [], row.other: []}
    for turn in range(rounds + 1):
        for name in sorted(found, reverse=turn % 2 == 1):
            model.set_attn_implementation(name)
            value = RATES[row.run](model, row, batch)
            if turn:  # the first round makes plans
                found[name].append(value)
    return found


def measure(rows: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Median rates of each row's implementations, and the median of their ratios."""
    models = {name: build_model(name) for name in {ROWS[label].model for label in rows}}
    results: dict[str, dict[str, float]] = {}
    for label in rows:
        row = ROWS[label]
        model, batch = models[row.model], build_batch(row.lengths)
        if row.run == "generate":
            median = generate_rates(model, row, batch, rounds)
            ratio = median["attnlib"] / median[row.other]
        else:
            found = run_rates(model, row, batch, rounds)
            ratio = statistics.median(a / b for a, b in zip(*found.values(), strict=True))
            median = {name: statistics.median(rates) for name, rates in found.items()}
        results[label] = {**median, "ratio": ratio, "rounds": rounds}
        shown = "  ".join(f"{name} {value:8.1f} tokens/s" for name, value in median.items())
        print(f"{label:26} {shown}  ratio {ratio:.3f}", flush=True)
    return results


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--record", action="store_true", help="write the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    integration.register()
    results = measure(arguments.rows, arguments.rounds)
    if arguments.record:
        record(results)


def record(results: dict[str, dict[str, float]]) -> None:
    """Write rows beside those that the file has of the same commit."""
    command = "python benchmarks/generate_overhead.py --record"
    facts = {**provenance(command), "transformers": transformers.__version__}
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = before["results"] if before.get("commit") == facts["commit"] else {}
    rows = {label: (rows | results)[label] for label in ROWS if label in rows | results}
    report = {**facts, "seconds": "CPU time of the process", "results": rows}
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
