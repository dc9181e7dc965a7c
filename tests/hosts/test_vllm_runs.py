"""vLLM's engine over attnlib in processes of other settings: its second model runner, several
processes, interpreted Triton kernels. Token for token against transformers, as
`test_vllm_engine.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.expected import (
    attnlib_name,
    expected_tokens,
    hearing_or_seeing,
    page_tokens,
    verifying,
)
from tests.hosts.install import VLLM
from tests.hosts.models import SPAN, WITH_SPANS

pytestmark = pytest.mark.hosts

RUNNER_2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
"""vLLM's second model runner; its kernels run in Triton's interpreter."""

MORE = "qwen3", "gemma3"


@pytest.mark.parametrize("version", VLLM)
def test_tokens_by_the_second_model_runner(engine: Any, models: Path, version: str) -> None:
    sizes = {"block_size": 16}
    cases: dict[str, Any] = {
        name: {"model": str(models / name), "new_tokens": 8, "arguments": sizes}
        for name in ("llama", "mistral", "gemma2", "deepseek")
    }
    cases["llama"]["repeat"] = 2
    stored = "int8_per_token_head"
    cases[stored] = {**cases["mistral"], "model": cases["llama"]["model"]}
    cases[stored]["arguments"] = {**sizes, "kv_cache_dtype": stored}
    cases["loops"] = verifying(models, **sizes)
    cases["deepseek-v32"] = {**cases["deepseek"], "model": str(models / "deepseek-v32")}
    cases["deepseek-v32"]["arguments"] = {"block_size": 64}  # that of indexers
    if version == VLLM[1]:  # one release is enough
        more = {name: {**cases["mistral"], "model": str(models / name)} for name in MORE}
        more |= hearing_or_seeing(models, version, **sizes)
        cases |= {name: {**case, "new_tokens": 8} for name, case in more.items()}
    results = engine(version, cases, **RUNNER_2, ATTNLIB_BACKEND="torch")
    verified = results.pop("loops")
    if version == VLLM[0]:
        assert "does not yet support: ngram" in verified["error"]
    else:
        assert verified.get("error") is None and verified["accepted"] > 0
        assert verified["tokens"] == expected_tokens(models, "loops")
    for name, result in results.items():
        assert result.get("error") is None, name
        assert result["runner"] == "vllm.v1.worker.cpu.model_runner"
        expected = page_tokens(models, stored) if name == stored else expected_tokens(models, name)
        assert result["tokens"] == [row[:8] for row in expected], name
    assert sum(results["llama"]["cached_tokens"]) >= 128


def test_tokens_with_decode_context_parallelism(engine: Any, models: Path) -> None:
    """Two processes, each with half of the cached tokens; layers without and with windows and soft
    caps. (vLLM 0.33 has no such CPU path.)"""
    arguments = {
        "tensor_parallel_size": 2, "decode_context_parallel_size": 2,
        "distributed_executor_backend": "mp",
    }  # fmt: skip
    windows = {**arguments, "disable_hybrid_kv_cache_manager": True}
    cases = {
        "mqa": {"model": str(models / "mqa"), "arguments": arguments},
        "gemma2-mqa": {"model": str(models / "gemma2-mqa"), "arguments": windows},
    }
    for name, result in engine(VLLM[0], cases).items():
        assert result.get("error") is None
        assert result["tokens"] == expected_tokens(models, name)


def test_tokens_with_exchanges_by_memory(engine: Any, models: Path, tmp_path: Path) -> None:
    """As GPUs of one host do: decodes exchange queries and results, and mixed batches queries."""
    arguments = {
        "tensor_parallel_size": 2, "decode_context_parallel_size": 2,
        "distributed_executor_backend": "mp",
    }  # fmt: skip
    case = {"model": str(models / "mqa"), "new_tokens": 4, "prompts": 2, "arguments": arguments}
    variables = {"TRITON_INTERPRET": "1", "ATTNLIB_BACKEND": "torch", "TEST_SHARED": str(tmp_path)}
    found = engine(VLLM[0], {"mqa": case}, "vllm_by_memory.py", **variables)["mqa"]
    assert found.get("error") is None
    assert found["tokens"] == [row[:4] for row in expected_tokens(models, "mqa")[:2]]
    counts = [(tmp_path / rank).read_text() for rank in ("0", "1")]
    queries, results = map(int, counts[0].split())
    assert counts[0] == counts[1] and queries >= results >= 2 * 2, counts


@pytest.mark.parametrize("version", VLLM)
def test_tokens_of_two_processes(engine: Any, models: Path, version: str) -> None:
    """Prefill context parallelism: each has half of the new tokens of a chunk and all cached
    latents. Tensor parallelism: each has half of the heads."""
    sizes = {"deepseek": "prefill_context_parallel_size", "llama": "tensor_parallel_size"}
    arguments = {"block_size": 16, "distributed_executor_backend": "mp"}
    cases = {
        name: {
            "model": str(models / name), "new_tokens": 4, "arguments": {**arguments, size: 2}
        }
        for name, size in sizes.items()
    }  # fmt: skip
    for name, result in engine(version, cases, **RUNNER_2, ATTNLIB_BACKEND="torch").items():
        assert result.get("error") is None, name
        assert result["tokens"] == [row[:4] for row in expected_tokens(models, name)], name


def drafting(models: Path, version: str) -> dict[str, Any]:
    """A case with drafts whose tokens see each other. vLLM selects their backend on its own."""
    drafts = {
        "method": "dflash", "model": str(models / "qwen3-drafts"), "num_speculative_tokens": 3,
        "attention_backend": attnlib_name(version),
    }  # fmt: skip
    return {
        "model": str(models / "qwen3"), "prompts": 3, "new_tokens": 3, "drafts": True,
        "arguments": {"speculative_config": drafts},
    }  # fmt: skip


def noisy(models: Path) -> dict[str, Any]:
    """A case with drafts of another model, of which the target accepts some. The next step is
    scheduled before that is known: lengths on the host are bounds."""
    drafts = {
        "method": "draft_model", "model": str(models / "llama-drafts"), "max_model_len": 512,
        "num_speculative_tokens": 3, "attention_backend": attnlib_name(VLLM[0]),
    }  # fmt: skip
    arguments = {"async_scheduling": True, "speculative_config": drafts, "disable_log_stats": False}
    return {"model": str(models / "llama"), "prompts": 4, "new_tokens": 8, "arguments": arguments}


def check_drafts(result: dict[str, Any], models: Path) -> None:
    """Each of the two layers attends to all keys, and the tokens are those of the target."""
    assert result.get("error") is None
    assert result["tokens"] == [row[:3] for row in expected_tokens(models, "qwen3")[:3]]
    drafts = result["drafts"]
    assert drafts["calls"] >= 4 and drafts["error"] < 1e-4 < 1e-2 < drafts["to_causal"]


INTERPRETED = {
    "ATTNLIB_BACKEND": "triton", "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",  # vLLM's kernels are interpreted, too
}  # fmt: skip


def test_tokens_by_interpreted_triton_kernels(engine: Any, models: Path) -> None:
    cases = {
        "llama": {"model": str(models / "llama"), "prompts": 4, "new_tokens": 6},
        "deepseek": {"model": str(models / "deepseek"), "prompts": 2, "new_tokens": 3},
    }
    stored = "int8_per_token_head"
    cases[stored] = {
        "model": str(models / "llama"), "prompts": 2, "new_tokens": 3,
        "arguments": {"kv_cache_dtype": stored},
    }  # fmt: skip
    more = {"drafts": drafting(models, VLLM[0]), "noisy": noisy(models)}
    results = engine(VLLM[0], {**cases, **more}, **INTERPRETED)
    check_drafts(results["drafts"], models)
    assert 0 < results["noisy"]["accepted"] < results["noisy"]["drafted"]
    assert results["noisy"]["tokens"] == [row[:8] for row in expected_tokens(models, "llama")[:4]]
    assert all(result["batches_in_flight"] == 2 for result in results.values())
    for name, case in cases.items():
        assert results[name]["backends"] == ["triton"]
        expected = page_tokens(models, stored) if name == stored else expected_tokens(models, name)
        expected = expected[: case["prompts"]]
        assert results[name]["tokens"] == [row[: case["new_tokens"]] for row in expected]


def test_tokens_with_image_spans_and_drafts_by_interpreted_triton_kernels(
    engine: Any, models: Path
) -> None:
    """No prefill is split inside a span, as vLLM does for images."""
    cases = {
        name: {
            "model": str(models / name), "span": SPAN, "new_tokens": 3,
            "arguments": {"max_num_batched_tokens": 512},
        }
        for name in WITH_SPANS
    }  # fmt: skip
    all_cases = {"drafts": drafting(models, VLLM[1]), **cases}  # a process keeps its spans
    results = engine(VLLM[1], all_cases, **INTERPRETED)
    assert all(result["batches_in_flight"] == 2 for result in results.values())
    check_drafts(results.pop("drafts"), models)
    for name, result in results.items():
        expected = json.loads((models / name / "expected.json").read_text())
        assert result.get("error") is None and result["backends"] == ["triton"]
        assert result["tokens"] == [row[:3] for row in expected["span_tokens"]]
        plain = dict(zip(map(tuple, expected["prompts"]), expected["tokens"], strict=True))
        others = [plain[tuple(prompt)] for prompt in expected["span_prompts"]]
        assert sum(a != b for a, b in zip(expected["span_tokens"], others, strict=True)) > 1
