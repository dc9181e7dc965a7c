"""Tokens per second of `model.generate` with attnlib and with sdpa, on one CPU thread.

    python benchmarks/generate_overhead.py

A Llama of 4 layers with hidden size 512 in float32 continues a prompt of 512 tokens by 64 tokens:
one request, and four requests with left padding. The two implementations take turns in one process,
and the median over the rounds is reported. Seconds are CPU time of the process, so that other
processes do not count. Prefill is not counted: a call with one new token is subtracted.

Writes benchmarks/results/generate_overhead.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import attnlib.integrations.transformers as integration
from attnlib.bench.provenance import provenance

RESULTS = Path(__file__).parent / "results" / "generate_overhead.json"
PROMPT, NEW_TOKENS = 512, 64
BATCHES = {"batch 1": (512,), "batch 4, padded": (512, 480, 400, 256)}


def build_model() -> Any:
    """The model in evaluation mode; no token ends a sequence."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def build_batch(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Random prompts with left padding: `input_ids` and `attention_mask`, `[B, PROMPT]`."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 1024, (len(lengths), PROMPT), generator=generator)
    columns = torch.arange(PROMPT)
    mask = torch.stack([columns >= PROMPT - length for length in lengths]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def seconds(model: Any, batch: dict[str, torch.Tensor], name: str, new_tokens: int) -> float:
    """CPU time of one greedy `generate` call."""
    model.set_attn_implementation(name)
    started = time.process_time()
    model.generate(**batch, max_new_tokens=new_tokens, do_sample=False)
    return time.process_time() - started


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Decoded tokens per second for each batch and implementation, and their ratio."""
    model, results = build_model(), {}
    for label, lengths in BATCHES.items():
        batch = build_batch(lengths)
        rates: dict[str, list[float]] = {"attnlib": [], "sdpa": []}
        for name in rates:
            seconds(model, batch, name, 4)
        for _ in range(rounds):
            for name, found in rates.items():
                prefill = seconds(model, batch, name, 1)
                whole = seconds(model, batch, name, NEW_TOKENS + 1)
                found.append(NEW_TOKENS * len(lengths) / (whole - prefill))
        median = {name: statistics.median(found) for name, found in rates.items()}
        results[label] = {**median, "ratio": median["attnlib"] / median["sdpa"]}
    return results


def main() -> None:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    integration.register()
    results = measure(arguments.rounds)
    for label, row in results.items():
        print(
            f"{label:16} attnlib {row['attnlib']:7.1f} tokens/s  sdpa {row['sdpa']:7.1f} tokens/s"
            f"  ratio {row['ratio']:.2f}"
        )
    report = {**provenance(), "transformers": transformers.__version__, "results": results}
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
