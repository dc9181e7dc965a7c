"""Nothing is compiled while vLLM serves: every kernel of random batches was run by the warm-up.

Launches are recorded by Triton's own keys, not run (`recorded_engine.py`), with the heuristics of a
Hopper GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import run_script
from tests.hosts.install import VLLM

pytestmark = pytest.mark.hosts

ARGUMENTS: dict[str, Any] = {
    "enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"},
    "max_num_batched_tokens": 512, "dtype": "bfloat16",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "qwen3-next": {"block_size": 48},  # first: only the first engine may have experts
    "llama": {}, "gemma2": {}, "llama fp8": {"kv_cache_dtype": "fp8"}, "deepseek": {},
    "llama int8": {"kv_cache_dtype": "int8_per_token_head"},
    "llama eager": {"enforce_eager": True}, "deepseek-v32": {"block_size": 64},
}  # fmt: skip
"""Name of the model and more -> arguments of the engine."""
_N_GRAMS = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2
}  # fmt: skip
MORE: dict[str, dict[str, dict[str, Any]]] = {
    VLLM[0]: {
        "loops n-grams": {"speculative_config": _N_GRAMS},
        "llama nvfp4": {"kv_cache_dtype": "nvfp4"},
    },
    VLLM[1]: {
        "gemma3": {}, "deepseek fp8": {"kv_cache_dtype": "fp8"},
        "llama rotated": {"kv_cache_dtype": "int8_per_token_head,nvfp4+hadamard"},
    },
}  # fmt: skip
"""Those of one release only, as `CASES`."""
_IN_PAGES = "llama int8", "llama nvfp4", "llama rotated"


@pytest.mark.parametrize(("version", "runner"), [*((v, "0") for v in VLLM), (VLLM[1], "1")])
def test_engine(engine: Any, models: Path, version: str, runner: str) -> None:
    """Both model runners. The second one has the registry of 0.33 also on a CPU, and Triton, which
    vLLM's indexers need."""
    cases = {
        name: {
            "model": str(models / name.split()[0]), "times": 3, "arguments": {**ARGUMENTS, **more},
            "first_alone": name == "qwen3-next",
        }
        for name, more in {**CASES, **(MORE[version] if runner == "0" else {})}.items()
        if (name != "deepseek-v32" if runner == "0" else name.startswith(("llama", "deepseek-v32")))
    }  # fmt: skip
    variables = {"ATTNLIB_VLLM_STATES": "1"}
    if runner == "1":  # then vLLM's own kernels of states cannot be imported without a GPU
        variables = {"VLLM_USE_V2_MODEL_RUNNER": "1", "CUDA_VISIBLE_DEVICES": ""}
    results = engine(version, cases, "recorded_engine.py", **variables)
    for name, result in results.items():
        assert result.get("error") is None, name
        assert result["backends"] == ["triton"]
        write = "write_pages_kernel" if name in _IN_PAGES else "write_kv_kernel"
        kernels = {"decode_kernel", "prefill_kernel", write}
        if name == "qwen3-next":
            kernels |= {"fused_step_kernel", "short_convolution_kernel"}
            kernels |= {"state_matrices_kernel", "state_step_kernel"}
        if name == "deepseek-v32":
            kernels = {"hopper_selected_swap_ab_kernel", write}
        assert kernels <= set(result["served"]), (name, result["served"])
        if name == "llama eager":
            assert len(result["late"]) == len(result["served"]) and not result["started_by"]
            continue
        assert result["late"] == [], name
        starters = set(result["started_by"])
        if name == "qwen3-next":  # its inputs are known from the first run on
            assert "run_step" in starters
            starters.remove("run_step")
        (starter,) = starters
        assert (starter == "compile") == (runner == "1"), name


@pytest.mark.parametrize("version", VLLM)
def test_masks_and_decode_context_parallelism(environment: Any, version: str) -> None:
    printed = run_script("recorded_adapter.py", environment(version, TEST_VLLM_CPU="1"))
    for kind, result in json.loads(printed.splitlines()[-1]).items():
        assert result["served"] >= 2 and result["late"] == [], kind
        if kind in ("images", "drafts", "cross-attention"):  # as a layer without vLLM
            assert result["calls"] <= 8, "the second layer of a step looks its plan up again"


@pytest.mark.parametrize("version", VLLM)
def test_kernels_can_be_compiled_without_a_gpu(environment: Any, version: str) -> None:
    """`attnlib compile --engine vllm` writes every kernel and note of the adapter's warm-ups."""
    printed = run_script("vllm_described.py", environment(version, TEST_VLLM_CPU="1"))
    for kind, result in json.loads(printed.splitlines()[-1]).items():
        assert result["needed"] >= 5 and result["left out"] == [], kind
        assert result["notes"] == 1 and result["other notes"] == [], kind
