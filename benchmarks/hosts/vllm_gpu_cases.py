"""Cases for `tests/hosts/run_engine.py` on a GPU: tiny models, token for token.

    python tests/hosts/models.py MODELS llama mistral gemma2 loops deepseek mqa gemma2-mqa
    python benchmarks/hosts/vllm_gpu_cases.py MODELS cases.json
    TEST_VLLM_CPU=0 python tests/hosts/run_engine.py cases.json results.json
    python benchmarks/hosts/vllm_gpu_cases.py MODELS cases.json results.json     # compares

With `divided N` after them it writes the cases for N GPUs instead, a file of each into the folder
cases.json, so that they can run together; several results are compared together, too. With `latent`
it writes those of latent attention (MLA), where the peer is FLASH_ATTN_MLA. float32 runs of attnlib
must give the tokens of transformers. FLASH_ATTN has no float32: both backends are compared in
bfloat16, and with n-gram speculation in float16, with acceptance rates.
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


def _backend(name: str) -> dict[str, str]:
    """Arguments that select a backend; attnlib, whose name depends on the release, is the default
    of `run_engine.py`."""
    return {} if name == "CUSTOM" else {"attention_backend": name}


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
        found[f"float16 ngram {backend}"] = {
            "model": str(models / "loops"), "new_tokens": 200, "leads": True,
            "arguments": {"speculative_config": _NGRAM, **_backend(backend),
                          "dtype": "float16", "disable_log_stats": False,
                          **_graphs("FULL_DECODE_ONLY")},
        }  # fmt: skip
        found[f"bfloat16 {backend}"] = {
            "model": str(models / "llama"), "new_tokens": 64, "leads": True,
            "arguments": {**_backend(backend), "dtype": "bfloat16", **_graphs("FULL_DECODE_ONLY")},
        }  # fmt: skip
    return found


def divided(models: Path, gpus: int) -> dict[str, Any]:
    """Name -> case, for tensor parallelism and decode context parallelism over so many GPUs. Over
    latents in bfloat16 only: vLLM has no prefill in float32 there."""
    context = {
        "tensor_parallel_size": gpus, "distributed_executor_backend": "mp",
        "decode_context_parallel_size": gpus, **_graphs("FULL_DECODE_ONLY"),
    }  # fmt: skip
    latents = {**context, "block_size": 64}
    given = {
        "mqa tensor parallel": {**context, "decode_context_parallel_size": 1},
        "mqa context parallel": context,
        "gemma2-mqa context parallel": {**context, "disable_hybrid_kv_cache_manager": True},
    }
    found: dict[str, Any] = {
        name: {"model": str(models / name.split()[0]), "arguments": arguments}
        for name, arguments in given.items()
    }
    for backend in ("CUSTOM", "FLASH_ATTN"):
        name = {"FLASH_ATTN": "FLASH_ATTN_MLA"}.get(backend, backend)
        found[f"latent context parallel {backend}"] = {
            "model": str(models / "deepseek"), "new_tokens": 64, "leads": True,
            "arguments": {**latents, **_backend(name), "dtype": "bfloat16"},
        }  # fmt: skip
    return found


def latent(models: Path) -> dict[str, Any]:
    """Name -> case, over latents: short prompts in chunks, and long ones, whose keys and values
    attnlib computes for each head."""
    backends = {"CUSTOM": "CUSTOM", "FLASH_ATTN": "FLASH_ATTN_MLA"}
    found: dict[str, Any] = {}
    for name, more in {
        "eager": {}, "decode graphs": _graphs("FULL_DECODE_ONLY"),
        "full graphs": _graphs("FULL"),
    }.items():  # fmt: skip
        for short, backend in backends.items():
            found[f"latent {name} {short}"] = {
                "model": str(models / "deepseek"), "new_tokens": 64, "leads": True,
                "arguments": {**_backend(backend), "dtype": "bfloat16", "block_size": 64, **more},
            }  # fmt: skip
    for short, backend in backends.items():
        found[f"latent long {short}"] = {
            "model": str(models / "deepseek"), "new_tokens": 64, "leads": True, "times": 6,
            "arguments": {**_backend(backend), "dtype": "bfloat16", "block_size": 64,
                          "max_model_len": 1024, "max_num_batched_tokens": 1024,
                          "kv_cache_memory_bytes": 64 << 20,
                          **_graphs("FULL_DECODE_ONLY")},
        }  # fmt: skip
    return found


def report(models: Path, results: dict[str, Any]) -> None:
    """Print one line per case, and one per request that the backends continue differently."""
    for name, result in results.items():
        if "error" in result:
            print(f"{name}: {result['error'][:300]}")
            continue
        peer = results.get(name.replace("CUSTOM", "FLASH_ATTN"), {})
        expected = peer.get("tokens", [])
        if peer is result:
            model = name.split()[0]
            file = models / model / "expected.json"
            expected = json.loads(file.read_text())["tokens"] if file.exists() else []
        rows = list(zip(result["tokens"], expected, strict=True)) if expected else []
        pairs = [pair for row in rows for pair in zip(*row, strict=True)]
        equal = sum(a == b for a, b in pairs)
        of = f"{equal} of {len(pairs)} tokens equal" if pairs else "reference"
        print(f"{name}: {of}; drafted tokens accepted: {result.get('accepted')}")
        if pairs and peer is not result:
            for request, row in enumerate(rows):
                _print_divergence(request, row, (result["leads"], peer["leads"]))


def _print_divergence(request: int, rows: Any, leads: Any) -> None:
    """Where two rows of tokens differ first, and how close the choice was there. Kernels round
    differently; after the first difference the inputs differ, too."""
    differ = [index for index, (a, b) in enumerate(zip(*rows, strict=True)) if a != b]
    if differ:
        at = differ[0]
        ours, theirs = (side[request][at] for side in leads)
        typical = sorted(leads[1][request])[len(rows[1]) // 2]
        print(
            f"  request {request}: equal up to token {at}, where the chosen log-probabilities lead "
            f"by {ours:.2g} and {theirs:.2g} (median lead {typical:.2g})"
        )


def _write(target: Path, cases: dict[str, Any], *, apart: bool = False) -> None:
    """Write cases that need little of the GPU's memory, so that processes can share a GPU."""
    for case in cases.values():
        case["arguments"].setdefault("gpu_memory_utilization", 0.1)
    if not apart:
        target.write_text(json.dumps(cases))
        return
    target.mkdir(exist_ok=True)
    for name, case in cases.items():
        (target / f"{name.replace(' ', '_')}.json").write_text(json.dumps({name: case}))


if __name__ == "__main__":
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    if len(sys.argv) == 3:
        _write(target, cases(folder))
    elif sys.argv[3] == "latent":
        _write(target, latent(folder))
    elif sys.argv[3] == "divided":
        _write(target, divided(folder, int(sys.argv[4])), apart=True)
    else:
        found = [json.loads(Path(name).read_text()) for name in sys.argv[3:]]
        report(folder, {name: result for each in found for name, result in each.items()})
