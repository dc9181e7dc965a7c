"""Cases for `tests/hosts/run_engine.py` on a GPU: tiny models, token for token.

    python tests/hosts/models.py MODELS
    python benchmarks/hosts/vllm_gpu_cases.py MODELS cases.json
    ATTNLIB_TEST_VLLM_CPU=0 python tests/hosts/run_engine.py cases.json results.json
    python benchmarks/hosts/vllm_gpu_cases.py MODELS cases.json results.json     # compares

float32 runs of attnlib must give the tokens of transformers. FLASH_ATTN has no float32; the n-gram
runs compare both backends in float16, with their acceptance rates.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1,
          "prompt_lookup_max": 3}  # fmt: skip


def _graphs(mode: str) -> dict[str, Any]:
    sizes = [1, 2, 4, 8, 16, 32, 64]
    config = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}
    return {"enforce_eager": False, "compilation_config": config}


def cases(models: Path) -> dict[str, Any]:
    """Name -> case."""
    plain: dict[str, dict[str, Any]] = {
        "eager": {}, "decode graphs": _graphs("FULL_DECODE_ONLY"), "full graphs": _graphs("FULL")
    }  # fmt: skip
    found: dict[str, Any] = {}
    for model in ("llama", "mistral", "gemma2"):
        for name, arguments in plain.items():
            if model == "llama" or name == "full graphs":
                found[f"{model} {name}"] = {"model": str(models / model), "arguments": arguments}
    found["llama ngram"] = {
        "model": str(models / "llama"),
        "arguments": {"speculative_config": _NGRAM, **_graphs("FULL_DECODE_ONLY")},
    }
    for backend in ("CUSTOM", "FLASH_ATTN"):
        found[f"ngram float16 {backend}"] = {
            "model": str(models / "llama"), "new_tokens": 200,
            "arguments": {"speculative_config": _NGRAM, "attention_backend": backend,
                          "dtype": "float16", "disable_log_stats": False,
                          **_graphs("FULL_DECODE_ONLY")},
        }  # fmt: skip
    return found


def report(models: Path, results: dict[str, Any]) -> None:
    """Print one line per case."""
    for name, result in results.items():
        if "error" in result:
            print(f"{name}: {result['error'][:300]}")
            continue
        if name.startswith("ngram"):
            expected = results["ngram float16 FLASH_ATTN"]["tokens"]
        else:
            model = name.split()[0]
            expected = json.loads((models / model / "expected.json").read_text())["tokens"]
        pairs = [(a, b) for x, y in zip(result["tokens"], expected, strict=True)
                 for a, b in zip(x, y, strict=True)]  # fmt: skip
        equal = sum(a == b for a, b in pairs)
        print(f"{name}: {equal} of {len(pairs)} tokens equal; {result.get('accepted', '')}")


if __name__ == "__main__":
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    if len(sys.argv) > 3:
        report(folder, json.loads(Path(sys.argv[3]).read_text()))
    else:
        target.write_text(json.dumps(cases(folder)))
