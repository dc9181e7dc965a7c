"""Greedy tokens of the example model with eager, sdpa and attnlib.

    python benchmarks/real_model_tokens.py
    TRITON_INTERPRET=1 python benchmarks/real_model_tokens.py --backend triton --tokens 3 --short 4
    python benchmarks/real_model_tokens.py --backend triton --device cuda --dtype bfloat16

`generate` of transformers continues 20 prompts by 24 tokens: 16 short ones in one batch with left
padding, and 4 of more than 512 tokens, which fill the windows of the model, in another one. Tokens
are compared with those of eager attention. A text that differs has the logits of its first other
token computed again: by how much eager attention prefers its own, relative to the largest logit.

Needs `attnlib[model]`. Adds the run to benchmarks/results/real_model_tokens.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import attnlib
import attnlib.integrations.transformers as integration
from attnlib import example_model
from attnlib.bench.provenance import provenance
from attnlib.cli.arguments import count, model_dtype, present_device
from attnlib.cli.demo.prompts import prompts

RESULTS = Path(__file__).parent / "results" / "real_model_tokens.json"
MORE = (
    "The days of the week are Monday, Tuesday, Wednesday,",
    "A triangle has three sides, a square has",
    "My favorite season is autumn, because",
    "The president of the company said that the new product",
)
LONG, LONG_CHARACTERS = 4, 2800


def all_prompts(short: int) -> tuple[list[str], list[str]]:
    """The short prompts, at most 16, and the long ones, without which a short run does."""
    texts = [prompt.text for prompt in prompts(12, tiny=False)] + list(MORE)
    text = example_model.text()
    parts = [text[start:][:LONG_CHARACTERS] for start in range(0, LONG * 4000, 4000)]
    return texts[:short], parts if short >= len(texts) else []


class Run:
    """The model, its tokenizer, and what all implementations share."""

    def __init__(self, device: str, dtype: torch.dtype, tokens: int) -> None:
        folder = example_model.checkpoint()
        self.device, self.tokens = device, tokens
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = loaded.to(device)

    def generate(self, implementation: str, texts: list[str]) -> list[list[int]]:
        """The generated tokens of each text."""
        self.model.set_attn_implementation(implementation)
        batch = self.tokenizer(texts, return_tensors="pt", padding=True).to(self.device)
        found = self.model.generate(
            **batch, max_new_tokens=self.tokens, min_new_tokens=self.tokens, do_sample=False
        )
        return found[:, batch["input_ids"].shape[1] :].tolist()

    @torch.no_grad()
    def margin(self, text: str, expected: list[int], other: list[int]) -> dict[str, Any]:
        """Where two continuations of a text part, and how clearly eager attention decides there."""
        place = next(
            i for i, pair in enumerate(zip(expected, other, strict=True)) if len({*pair}) > 1
        )
        self.model.set_attn_implementation("eager")
        ids = self.tokenizer(text)["input_ids"] + expected[:place]
        logits = self.model(torch.tensor([ids], device=self.device)).logits[0, -1].float()
        margin = logits[expected[place]] - logits[other[place]]
        return {"token": place, "relative_margin": float(margin / logits.abs().max())}


def measure(run: Run, short: int) -> dict[str, Any]:
    """The texts of eager attention, and for each other implementation what differs."""
    batches = [batch for batch in all_prompts(short) if batch]
    texts = [text for batch in batches for text in batch]
    made: dict[str, list[list[int]]] = {}
    seconds = {}
    for name in ("eager", "sdpa", "attnlib"):
        started = time.perf_counter()
        made[name] = [tokens for batch in batches for tokens in run.generate(name, batch)]
        seconds[name] = round(time.perf_counter() - started, 1)
        print(f"{name}: {len(texts)} prompts, {seconds[name]} s", flush=True)
    found = {}
    for name in ("sdpa", "attnlib"):
        pairs = list(zip(texts, made["eager"], made[name], strict=True))
        found[name] = {
            "prompts": len(pairs),
            "identical_prompts": sum(expected == tokens for _, expected, tokens in pairs),
            "tokens": sum(len(expected) for _, expected, _ in pairs),
            "identical_tokens": sum(
                a == b
                for _, expected, tokens in pairs
                for a, b in zip(expected, tokens, strict=True)
            ),
            "differences": [
                {"prompt": index, **run.margin(*pair)}
                for index, pair in enumerate(pairs)
                if pair[1] != pair[2]
            ],
        }
    rows = [
        {
            "prompt_tokens": len(run.tokenizer(text)["input_ids"]),
            "end_of_prompt": text[-60:],
            "text": run.tokenizer.decode(tokens),
        }
        for text, tokens in zip(texts, made["eager"], strict=True)
    ]
    return {"seconds": seconds, "compared_with_eager": found, "prompts": rows}


def main() -> None:
    """Generate, compare, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="torch", help="backend of attnlib (default torch)")
    parser.add_argument("--device", type=present_device, default="cpu")
    parser.add_argument("--dtype", type=model_dtype, default=torch.float32)
    parser.add_argument("--tokens", type=count, default=24, help="new tokens (default 24)")
    parser.add_argument(
        "--short", type=count, default=16, help="short prompts; below 16 without long ones"
    )
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    integration.register()
    run = Run(options.device, options.dtype, options.tokens)
    with attnlib.use_backend(options.backend):
        result = measure(run, options.short)
    for name, found in result["compared_with_eager"].items():
        print(name, found)
    label = f"{options.backend} {options.device} {str(options.dtype).removeprefix('torch.')}"
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    document[label] = {**provenance(), "transformers": transformers.__version__, **result}
    RESULTS.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
