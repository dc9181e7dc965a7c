"""Compare the tokens of two backends: first divergence, and how close the choice was there.

    python benchmarks/hosts/compare_tokens.py results.jsonl

Reads the `compare` rows of `vllm_throughput.py`. In bfloat16 two kernels round differently, so that
tokens may differ where two logits are nearly equal; after the first difference the inputs differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(path: Path) -> None:
    """One line per mode and request."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(r["backend"], r["mode"]): r for r in rows if r["workload"] == "compare"}
    for mode in sorted({mode for _, mode in found}):
        ours, theirs = found.get(("CUSTOM", mode)), found.get(("FLASH_ATTN", mode))
        if ours is None or theirs is None:
            continue
        for request, (a, b) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
            differ = [
                index for index, pair in enumerate(zip(a, b, strict=True)) if len({*pair}) > 1
            ]
            text = f"all {len(a)} tokens equal"
            if differ:
                first = differ[0]
                leads = ours["leads"][request], theirs["leads"][request]
                text = (
                    f"equal up to token {first}, where the choices lead by {leads[0][first]:.3g} "
                    f"and {leads[1][first]:.3g} (median lead {sorted(leads[1])[len(b) // 2]:.3g})"
                )
            print(f"{mode}, request {request}: {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
