"""vLLM's engine over attnlib on a CPU, token for token against transformers (eager).

Prompts are prefilled in chunks of 64 tokens, and prefix caching is on. A process runs several
engines, because importing vLLM takes longer than starting one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.object_path import load_object
from tests.hosts.expected import (
    attnlib_name,
    expected_tokens,
    hearing_or_seeing,
    page_tokens,
    verifying,
)
from tests.hosts.install import VLLM
from tests.hosts.models import PROMPT_LENGTHS, ROTATED, SIZES, STORED_TOKENS
from tests.hosts.models import STORED as STORED_NAMES
from tests.hosts.state_models import MODELS as MODELS_WITH_STATES
from tests.kv_formats.conftest import MODULE

pytestmark = pytest.mark.hosts
MODELS = ("llama", "mistral", "gemma2", "gemma3", "qwen3", "deepseek")
STORED = {"llama": "auto", "llama int8": "int8_per_token_head", "deepseek": "auto"}
STORED["deepseek fp8"] = "fp8"
"""Model and more -> `kv_cache_dtype` of the cache that a connector saves."""

STATES = {"ATTNLIB_VLLM_STATES": "1"}
LITTLE = {"num_gpu_blocks_override": 16, "max_model_len": 192, "disable_log_stats": False}
ROTATION = {"attnlib": {"kv_rotation": "hadamard"}}


def stored_arguments(version: str) -> dict[str, Any]:
    """Name -> arguments, of the caches with scales in the page that a release can name."""
    names = {name: {"kv_cache_dtype": name} for name in STORED_NAMES}
    if version == VLLM[1]:
        return names
    own = "int8_per_token_head", "fp8_per_token_head", "nvfp4"
    rotated = {"kv_cache_dtype": ROTATED.split("+")[0], "additional_config": ROTATION}
    return {name: names[name] for name in own} | {ROTATED: rotated}


@pytest.fixture(scope="module", params=VLLM)
def results(request: pytest.FixtureRequest, engine: Any, models: Path) -> dict[str, Any]:
    """All cases of one release that run in one process."""
    cases = state_cases(models, request.param)  # first: only the first engine may have experts
    cases |= {name: {"model": str(models / name)} for name in MODELS}
    cases["llama twice"] = {**cases["llama"], "repeat": 2}
    cases["little memory"] = {**cases["llama"], "arguments": LITTLE}
    cases["tiny chunks"] = {**cases["gemma2"], "arguments": {"max_num_batched_tokens": 8}}
    cases["blocks of 64"] = {**cases["llama"], "arguments": {"block_size": 64}}
    cases["one window for all"] = {
        **cases["gemma2"], "arguments": {"disable_hybrid_kv_cache_manager": True}
    }  # fmt: skip
    named = dict.fromkeys(("full_attention", "sliding_window"), attnlib_name(request.param))
    kinds = {"attention_backend": None, "attention_config": {"backend_per_kind": named}}
    cases["by kind"] = {**cases["gemma2"], "arguments": kinds}
    pooling = {"runner": "pooling", "skip_tokenizer_init": False, "max_model_len": 256}
    cases["bert"] = {
        "model": str(models / "bert"), "pooling": True,
        "arguments": {**pooling, "max_num_batched_tokens": 256},
    }  # fmt: skip
    cases["refused"] = {**cases["llama"], "arguments": {"kv_cache_dtype": "int4_per_token_head"}}
    if request.param == VLLM[1]:
        cases["name of 0.26"] = {**cases["llama"], "arguments": {"attention_backend": "CUSTOM"}}
    skipped = {"kv_cache_dtype": next(iter(PAGE_FORMATS)), "kv_cache_dtype_skip_layers": ["1"]}
    few = {**cases["llama"], "new_tokens": STORED_TOKENS}
    cases["all but one layer"] = {**few, "arguments": skipped}
    for stored, arguments in stored_arguments(request.param).items():
        cases[stored] = {**few, "arguments": arguments}
    cases["rotated"] = {**cases["llama"], "arguments": {"additional_config": ROTATION}}
    cases |= stored_cases(models, request.param)
    cases |= hearing_or_seeing(models, request.param)
    # The last case: no engine of 0.33 starts in a process that has loaded numba for n-grams.
    cases["n-grams"] = verifying(models)
    variables = {"VLLM_MM_HASHER_ALGORITHM": "sha256"} if request.param == VLLM[0] else {}
    found: dict[str, Any] = engine(request.param, cases, **variables, **STATES)
    return found | {"version": request.param}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers(results: dict[str, Any], models: Path, name: str) -> None:
    assert results[name].get("error") is None
    assert results[name]["tokens"] == expected_tokens(models, name)
    assert results[name]["backends"] == ["torch"]


def test_no_model_repeats_one_token(models: Path) -> None:
    for name in MODELS:
        for tokens in expected_tokens(models, name):
            assert len(set(tokens)) > 4, (name, tokens)


def test_layers_with_windows_have_a_cache_group_of_their_own(results: dict[str, Any]) -> None:
    assert results["llama"]["cache_groups"] == 1
    assert results["gemma2"]["cache_groups"] == 2
    assert results["one window for all"]["cache_groups"] == 1


def test_backends_may_be_named_by_kind_of_layer(results: dict[str, Any], models: Path) -> None:
    assert results["by kind"].get("error") is None
    assert results["by kind"]["tokens"] == expected_tokens(models, "gemma2")
    assert results["by kind"]["backends"] == ["torch"]


def test_layers_of_one_group_may_differ_in_window(results: dict[str, Any], models: Path) -> None:
    assert results["one window for all"]["tokens"] == expected_tokens(models, "gemma2")


def test_verified_n_grams_give_the_same_tokens(results: dict[str, Any], models: Path) -> None:
    result = results["n-grams"]
    assert result.get("error") is None
    assert result["tokens"] == expected_tokens(models, "loops")
    assert result["accepted"] > 0


@pytest.mark.parametrize("name", ["whisper", "gemma3-images"])
def test_tokens_of_models_that_hear_or_see(
    results: dict[str, Any], models: Path, name: str
) -> None:
    """Cross-attention; images whose tokens see each other."""
    assert results[name].get("error") is None
    expected = json.loads((models / name / "expected.json").read_text())
    assert results[name]["tokens"] == expected["tokens"]
    first, second = expected["tokens"][:2]
    assert first != second  # their prompts differ in what is heard or seen
    if "causal_tokens" in expected:
        pairs = list(zip(expected["tokens"], expected["causal_tokens"], strict=True))
        assert [a == b for a, b in pairs] == [False, False, False, True]  # the last is text


def test_cached_prefixes_give_the_same_tokens(results: dict[str, Any], models: Path) -> None:
    again = results["llama twice"]
    assert again["tokens"] == expected_tokens(models, "llama")
    assert sum(again["cached_tokens"]) >= 128  # 0.33 caches longer runs of blocks


def test_preempted_requests_and_tiny_chunks_give_the_same_tokens(
    results: dict[str, Any], models: Path
) -> None:
    """A chunk of eight tokens holds parts of several prompts beside decodes."""
    preempted, chunks = results["little memory"], results["tiny chunks"]
    assert preempted["tokens"] == expected_tokens(models, "llama")
    assert preempted["preemptions"] > 0 or results["version"] == VLLM[1]  # which lets them wait
    assert chunks["tokens"] == expected_tokens(models, "gemma2")


def test_block_size(results: dict[str, Any], models: Path) -> None:
    assert results["blocks of 64"]["tokens"] == expected_tokens(models, "llama")


def test_encoder_states_equal_transformers(results: dict[str, Any], models: Path) -> None:
    assert results["bert"].get("error") is None
    expected = json.loads((models / "bert" / "expected.json").read_text())["states"]
    for got, state in zip(results["bert"]["states"], expected, strict=True):
        norm = sum(x * x for x in state) ** 0.5
        assert max(abs(a - b / norm) for a, b in zip(got, state, strict=True)) < 1e-5


def test_the_engine_prints_the_reason_of_a_refusal(results: dict[str, Any]) -> None:
    message = results["refused"]["error"]
    assert "is not valid for this configuration" in message
    assert "kv_cache_dtype not supported" in message


def test_releases_with_names_say_that_of_attnlib(results: dict[str, Any]) -> None:
    if results["version"] == VLLM[0]:
        pytest.skip("vLLM 0.26 knows attnlib as CUSTOM")
    assert "--attention-backend ATTNLIB" in results["name of 0.26"]["error"]


def test_refused_rotations_have_reasons(results: dict[str, Any]) -> None:
    """0.26: only of caches with scales in the page. 0.33: only by the name of the format."""
    expected = {
        VLLM[0]: "kv_rotation=hadamard with --kv-cache-dtype auto: use int8_per",
        VLLM[1]: "kv_rotation=hadamard: use --kv-cache-dtype FORMAT+hadamard",
    }
    assert expected[results["version"]] in results["rotated"]["error"]


@pytest.mark.parametrize("stored", STORED_NAMES)
def test_tokens_over_pages_with_scales(
    results: dict[str, Any], models: Path, stored: str, request: pytest.FixtureRequest
) -> None:
    """Against transformers over a cache with the same round trip, and in as much less memory."""
    if stored not in results:
        pytest.skip("vLLM 0.26 takes no names of formats from others")
    result = results[stored]
    assert result.get("error") is None
    assert result["tokens"] == page_tokens(models, stored)
    size = SIZES["head_dim"]
    sides = stored.split("+")[0].split(",") * 2
    formats = [
        load_object(f"{MODULE}:ROTATED_4BIT") if ":" in side else PAGE_FORMATS.get(side)
        for side in sides[:2]
    ]
    used = sum(size * 4 if one is None else one.bytes_per_head(size) for one in formats)
    times = 2 * size * 4 / used
    assert result["blocks"] == pytest.approx(times * results["llama"]["blocks"], rel=0.02)


def test_layers_may_be_excluded_from_quantization(results: dict[str, Any], models: Path) -> None:
    result = results["all but one layer"]
    assert result.get("error") is None
    expected = json.loads((models / "llama" / "expected.json").read_text())
    assert result["tokens"] == expected["tokens_but_layer_1"]


@pytest.fixture(scope="module")
def later(results: dict[str, Any], engine: Any, models: Path) -> dict[str, Any]:
    """Results of a second process, whose cache is in HND order. It loads what the first saved."""
    version = results["version"]
    # The first case: vLLM does not ask again about layers that it has a backend for.
    absent = {"model": str(models / "llama"), "environment": {"ATTNLIB_BACKEND": "flash_attn"}}
    steps = {"async_scheduling": False}
    cases: dict[str, Any] = {"absent": absent}
    cases["hnd"] = {"model": str(models / "llama"), "arguments": steps}
    cases |= stored_cases(models, version)
    if version == VLLM[1]:  # the last case, as above
        cases["drafts of states"] = verifying(
            models, "nemotron-h", enable_prefix_caching=False, repeat=1
        )
    found: dict[str, Any] = engine(version, cases, VLLM_KV_CACHE_LAYOUT="HND", **STATES)
    return found


def state_cases(models: Path, version: str) -> dict[str, Any]:
    """Gated delta nets with cached prefixes; Mamba2 in less memory than the requests need."""
    prefixes = {"enable_prefix_caching": True}
    small = {"num_gpu_blocks_override": 18, "max_model_len": 192, "disable_log_stats": False}
    cases = {"qwen3-next": {"model": str(models / "qwen3-next"), "repeat": 2}}
    cases["qwen3-next"]["arguments"] = prefixes
    if version == VLLM[1]:
        cases["nemotron-h"] = {"model": str(models / "nemotron-h"), "arguments": small}
    return cases


def test_state_layers_give_the_same_tokens(results: dict[str, Any], models: Path) -> None:
    """Gated delta nets and Mamba2: prompts in chunks beside decodes, prefixes, preemption."""
    for name in results.keys() & MODELS_WITH_STATES:
        assert results[name].get("error") is None
        assert results[name]["tokens"] == expected_tokens(models, name)
        assert len({token for row in results[name]["tokens"] for token in row}) > 50
    assert sum(results["qwen3-next"]["cached_tokens"]) >= 128
    assert results["version"] == VLLM[0] or results["nemotron-h"]["preemptions"] > 0


def test_rejected_drafts_leave_no_trace_in_states(later: dict[str, Any], models: Path) -> None:
    """A page per request, in which a step may go back by all drafts of the last one."""
    if "drafts of states" not in later:
        pytest.skip("the samplers of vLLM 0.26 need compiled operations")
    result = later["drafts of states"]
    assert result.get("error") is None
    assert result["tokens"] == expected_tokens(models, "nemotron-h")
    assert 0 < result["accepted"] < result["drafted"]


def stored_cases(models: Path, version: str) -> dict[str, Any]:
    """Engines with a connector that saves prompts, or loads those that are there."""
    cases = {}
    for name, stored in STORED.items():
        path = str(models / f"stored-{version}-{name}")
        connector = {
            "kv_connector": "ExampleConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": path},
        }  # fmt: skip
        # The connector saves when a request starts, so that no prefill is split.
        sizes = {"block_size": 16, "max_num_batched_tokens": 512}
        cases[f"stored {name}"] = {
            "model": str(models / name.split()[0]), "from_tokens": 33,
            "new_tokens": STORED_TOKENS,
            "arguments": {"kv_transfer_config": connector, "kv_cache_dtype": stored, **sizes},
        }  # fmt: skip
    return cases


@pytest.mark.parametrize("name", STORED)
def test_a_connector_saves_and_another_process_loads(
    results: dict[str, Any], later: dict[str, Any], models: Path, name: str
) -> None:
    saved, loaded = results[f"stored {name}"], later[f"stored {name}"]
    assert saved.get("error") is None and loaded.get("error") is None
    lengths = [*PROMPT_LENGTHS, 99]
    assert loaded["cached_tokens"] == [(n - 1) // 16 * 16 for n in lengths if n >= 33]
    stored, plain = STORED[name], expected_tokens(models, name.split()[0])
    if stored == "fp8":  # transformers has no such round trip
        assert saved["tokens"] == loaded["tokens"] != results["stored deepseek"]["tokens"]
        return
    tokens = plain if stored == "auto" else page_tokens(models, stored)
    kept = [row[:STORED_TOKENS] for row, n in zip(tokens, lengths, strict=True) if n >= 33]
    assert saved["tokens"] == loaded["tokens"] == kept


def test_tokens_over_a_cache_in_hnd_order_scheduled_step_by_step(
    results: dict[str, Any], later: dict[str, Any], models: Path
) -> None:
    assert later["hnd"]["tokens"] == expected_tokens(models, "llama")
    assert later["hnd"]["batches_in_flight"] < results["llama"]["batches_in_flight"]


def test_a_backend_that_cannot_run_here_is_refused_with_its_reason(later: dict[str, Any]) -> None:
    assert "attnlib: flash_attn: " in later["absent"]["error"]
