"""How far generated tokens are from those of transformers in float32, each over the same prefix.

    python benchmarks/hosts/reference_margins.py cases.json results.json --out margins.json

Engines in bfloat16 round differently, and after the first difference their inputs differ. This
script therefore computes the logits of transformers over the tokens that an engine generated, and
reports by how much the logit of a chosen token is below the largest one: 0 where transformers
chooses the same token, small where rounding decides, and large where attention is wrong.

`cases.json` and `results.json` are those of `tests/hosts/run_engine.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def margins(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """`[len(tokens)]`: the largest logit less that of the chosen token."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return logits.max(-1).values - chosen


def main() -> None:
    """Print and write one row per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--models", type=Path, help="folder of the models, if it has moved")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cases, rows = json.loads(arguments.cases.read_text()), []
    for name, result in json.loads(arguments.results.read_text()).items():
        if "tokens" not in result:
            rows.append({"case": name, "error": result["error"]})
            continue
        folder = Path(cases[name]["model"])
        folder = arguments.models / folder.name if arguments.models else folder
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
        prompts = json.loads((folder / "expected.json").read_text())["prompts"]
        times = cases[name].get("times", 1)
        found = [
            margins(model, prompt * times, tokens)
            for prompt, tokens in zip(prompts, result["tokens"], strict=True)
        ]
        every = torch.cat(found)
        rows.append(
            {
                "case": name, "backends": result["backends"], "tokens": len(every),
                "equal": int((every == 0).sum()), "largest_margin": round(float(every.max()), 4),
                "margins_above_0.25": int((every > 0.25).sum()),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
