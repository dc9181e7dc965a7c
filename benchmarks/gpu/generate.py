"""Tokens per second of `model.generate` on a GPU with attnlib and with other implementations.

    python benchmarks/gpu/generate.py --out results.json
    python benchmarks/gpu/generate.py --models 1b --rows 1x1000+64 --implementations attnlib sdpa

Decoders with random bfloat16 weights in the shape of Llama 3 1B and 8B continue random prompts. A
row is requests x prompt tokens + new tokens; `padded` pads the prompts of a batch on the left. Each
implementation runs a row twice: the first run compiles, the second one is timed (the median of
`--rounds`), and the kernels of Triton that it compiles are counted. Implementations take turns.
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
from attnlib.testing.compilations import compiled_kernels

MODELS: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
ROWS: dict[str, tuple[int, int, int, bool, dict[str, Any]]] = {
    "1x1000+64": (1, 1000, 64, False, {}),
    "16x1000+64 padded": (16, 1000, 64, True, {}),
    "8x8000+32": (8, 8000, 32, False, {}),
    "1x1000+64 static": (1, 1000, 64, False, {"cache_implementation": "static"}),
}


def build_model(name: str, layers: int | None) -> Any:
    """A decoder on the GPU; no token ends a sequence."""
    torch.manual_seed(0)
    sizes = MODELS[name] | ({} if layers is None else {"num_hidden_layers": layers})
    config = transformers.LlamaConfig(
        **sizes,
        vocab_size=32000,
        max_position_embeddings=16384,
        pad_token_id=0,
        eos_token_id=None,
    )
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def build_batch(requests: int, prompt: int, padded: bool) -> dict[str, torch.Tensor]:
    """Random prompts; with `padded`, lengths fall from `prompt` to half of it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 32000, (requests, prompt), generator=generator)
    step = prompt // (2 * requests) if padded else 0
    mask = torch.stack([torch.arange(prompt) >= step * request for request in range(requests)])
    return {"input_ids": (ids * mask).cuda(), "attention_mask": mask.long().cuda()}


def run(model: Any, name: str, batch: dict[str, torch.Tensor], tokens: int, extra: Any) -> Any:
    """Seconds of one greedy `generate`, and its tokens."""
    model.set_attn_implementation(name)
    torch.cuda.synchronize()
    started = time.perf_counter()
    found = model.generate(**batch, max_new_tokens=tokens, do_sample=False, **extra)
    torch.cuda.synchronize()
    return time.perf_counter() - started, found[:, batch["input_ids"].shape[1] :]


def measure(model: Any, row: str, names: list[str], rounds: int) -> dict[str, Any]:
    """Tokens per second and compiled kernels of each implementation."""
    requests, prompt, tokens, padded, extra = ROWS[row]
    batch, found = build_batch(requests, prompt, padded), {}
    seconds: dict[str, list[float]] = {}
    tokens_of: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            first, _ = run(model, name, batch, tokens, extra)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        seconds[name] = []
        found[name] = {"first_run_s": first}
    for _ in range(rounds):
        for name, values in seconds.items():
            with compiled_kernels() as compiled:
                second, generated = run(model, name, batch, tokens, extra)
            values.append(second)
            found[name]["compiled"] = found[name].get("compiled", 0) + len(compiled)
            tokens_of[name] = generated
    for name, values in seconds.items():
        found[name]["tokens_per_s"] = requests * tokens / statistics.median(values)
    reference = tokens_of[next(iter(tokens_of))]
    for name, generated in tokens_of.items():
        # With random weights, rounding decides near ties, so that later tokens may differ.
        found[name]["equal_tokens"] = (
            (generated == reference).cummin(1).values.float().mean().item()
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["1b"], choices=MODELS)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--implementations", nargs="+", default=["sdpa", "attnlib"])
    parser.add_argument("--layers", type=int, help="layers of the model (default: those of it)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    integration.register()
    results: dict[str, Any] = {}
    with torch.inference_mode():
        for name in options.models:
            model = build_model(name, options.layers)
            for row in options.rows:
                results[f"{name} {row}"] = measure(
                    model, row, options.implementations, options.rounds
                )
                print(name, row, json.dumps(results[f"{name} {row}"]), flush=True)
            del model
    if options.out:
        options.out.write_text(json.dumps({**provenance(), "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
