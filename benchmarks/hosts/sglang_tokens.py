"""Tokens of SGLang's engine over a tiny Llama, with attnlib or another attention backend.

    python tests/hosts/models.py MODELS
    python benchmarks/hosts/sglang_tokens.py MODELS --backend attnlib --out tokens.jsonl

The line that it appends has the tokens of each prompt, and how many equal those of transformers in
float32. SGLang's kernels have no float32: in float16 other backends of SGLang are the reference,
and with `--native --dtype float32` its own operations run as PyTorch code (`sglang_native.py`).
`--ngram` drafts tokens from the text.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from sglang_fa3 import LIBRARY
from sglang_plugins import prepare

SPECULATION = {
    "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4,
    "speculative_ngram_min_bfs_breadth": 1, "speculative_ngram_max_bfs_breadth": 1,
}  # fmt: skip
"""One chain of drafted tokens; attnlib refuses trees."""


def main() -> None:
    """Start the engine and generate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, help="folder of `tests/hosts/models.py`")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs of decodes")
    parser.add_argument("--ngram", action="store_true")
    parser.add_argument("--native", action="store_true", help="SGLang's operations in PyTorch")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    wanted = {"sglang_native": arguments.native, "sglang_fa3": os.environ.get(LIBRARY)}
    prepare(*(module for module, is_wanted in wanted.items() if is_wanted))
    import sglang

    folder = arguments.models / arguments.model
    expected = json.loads((folder / "expected.json").read_text())
    start = time.perf_counter()
    more: dict[str, Any] = SPECULATION if arguments.ngram else {}
    engine = sglang.Engine(
        model_path=str(folder), skip_tokenizer_init=True, dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype, attention_backend=arguments.backend,
        page_size=arguments.page_size,
        disable_decode_cuda_graph=not arguments.graphs, disable_prefill_cuda_graph=True,
        mem_fraction_static=0.8, max_total_tokens=8192, max_running_requests=8,
        chunked_prefill_size=64, context_length=512, sampling_backend="pytorch",
        cuda_graph_max_bs_decode=8, log_level="warning", random_seed=0, **more,
    )  # fmt: skip
    up = time.perf_counter() - start
    sampling = {"temperature": 0, "max_new_tokens": arguments.new_tokens, "ignore_eos": True}
    outputs = engine.generate(input_ids=expected["prompts"], sampling_params=sampling)
    tokens = [row["output_ids"] for row in outputs]
    rows = zip(tokens, expected["tokens"], strict=True)
    pairs = [pair for a, b in rows for pair in zip(a, b, strict=False)]
    meta = [row["meta_info"] for row in outputs]
    row = {
        "backend": arguments.backend, "model": arguments.model, "dtype": arguments.dtype,
        "kv": arguments.kv_cache_dtype, "page_size": arguments.page_size,
        "graphs": arguments.graphs, "ngram": arguments.ngram, "native": arguments.native,
        "sglang": sglang.__version__, "engine_start_s": round(up, 1),
        "equal": sum(a == b for a, b in pairs), "of": len(pairs),
        "verify_steps": [entry.get("spec_verify_ct") for entry in meta] if more else None,
        "tokens": tokens,
    }  # fmt: skip
    with arguments.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print({key: value for key, value in row.items() if key != "tokens"}, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
