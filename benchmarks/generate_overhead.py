"""Speed of transformers with attnlib and with other implementations, on one CPU thread.

    python benchmarks/generate_overhead.py
    python benchmarks/generate_overhead.py --rows "static cache" "soft cap, prefill" --rounds 5

Random float32 decoders of 4 layers with hidden size 512 continue prompts of up to 512 tokens by 64
tokens: `generate` over a `DynamicCache` and over a static cache, with and without left padding, and
`generate_batch`. A Gemma 2 shape, whose scores have a soft cap, is compared with eager, because
sdpa has none; its prefill of 1024 tokens is a row of its own. The implementations take turns in one
process, and the median over the rounds of the ratios of neighbors is reported. Seconds are CPU time
of the process, so that other processes do not count. Prefill is not counted in the rows of
`generate`: a call with one new token is subtracted.

Writes benchmarks/results/generate_overhead.json, if all rows run.
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
from attnlib.bench.provenance import provenance

RESULTS = Path(__file__).parent / "results" / "generate_overhead.json"
PROMPT, NEW_TOKENS, PREFILL = 512, 64, 1024
PADDED = (512, 480, 400, 256)


@dataclass(frozen=True)
class Row:
    """One workload.

    Attributes:
        model: "llama" or "gemma2".
        other: the implementation that attnlib is compared with.
        lengths: tokens of each prompt.
        run: "generate", "prefill" or "batch".
        arguments: further arguments of `generate`.
    """

    model: str = "llama"
    other: str = "sdpa"
    lengths: tuple[int, ...] = (PROMPT,)
    run: str = "generate"
    arguments: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "batch 1": Row(),
    "batch 4, padded": Row(lengths=PADDED),
    "static cache": Row(arguments={"cache_implementation": "static"}),
    "static cache, padded": Row(lengths=PADDED, arguments={"cache_implementation": "static"}),
    "generate_batch": Row(lengths=(*PADDED, 40, 130, 300, 64), run="batch"),
    "soft cap": Row(model="gemma2", other="eager"),
    "soft cap, padded": Row(model="gemma2", other="eager", lengths=PADDED),
    "soft cap, prefill": Row(model="gemma2", other="eager", lengths=(PREFILL,), run="prefill"),
}


def build_model(name: str) -> Any:
    """The model in evaluation mode; no token ends a sequence."""
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
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=8)
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


def generate_rate(model: Any, row: Row, batch: dict[str, torch.Tensor]) -> float:
    """Decoded tokens per second of greedy `generate`."""

    def run(new_tokens: int) -> float:
        settings = {"max_new_tokens": new_tokens, "do_sample": False, **row.arguments}
        return seconds(lambda: model.generate(**batch, **settings))

    prefill = run(1)
    return NEW_TOKENS * len(row.lengths) / (run(NEW_TOKENS + 1) - prefill)


@torch.no_grad()
def prefill_rate(model: Any, row: Row, batch: dict[str, torch.Tensor]) -> float:
    """Prompt tokens per second of a forward without a cache."""
    return sum(row.lengths) / seconds(lambda: model(**batch, use_cache=False, logits_to_keep=1))


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


RATES = {"generate": generate_rate, "prefill": prefill_rate, "batch": batch_rate}


def measure(rows: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Median rates of each row's implementations, and the median of their ratios."""
    models = {name: build_model(name) for name in {ROWS[label].model for label in rows}}
    results: dict[str, dict[str, float]] = {}
    for label in rows:
        row = ROWS[label]
        model, batch, rate = models[row.model], build_batch(row.lengths), RATES[row.run]
        found: dict[str, list[float]] = {"attnlib": [], row.other: []}
        for turn in range(rounds + 1):
            for name, rates in found.items():
                model.set_attn_implementation(name)
                value = rate(model, row, batch)
                if turn:  # the first round makes plans
                    rates.append(value)
        ours, theirs = found.values()
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        median = {name: statistics.median(rates) for name, rates in found.items()}
        results[label] = {**median, "ratio": ratio}
        shown = "  ".join(f"{name} {value:8.1f} tokens/s" for name, value in median.items())
        print(f"{label:22} {shown}  ratio {ratio:.2f}", flush=True)
    return results


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    integration.register()
    results = measure(arguments.rows, arguments.rounds)
    if set(arguments.rows) == set(ROWS):
        facts = {**provenance(), "transformers": transformers.__version__}
        report = {**facts, "seconds": "CPU time of the process", "results": results}
        RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
