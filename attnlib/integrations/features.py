"""What attnlib does inside other engines, by feature and release: the test of it, or why not.

`docs/engines.md` is generated from `FEATURES`, and `attnlib doctor` prints the part that applies to
the engines that are installed.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ENGINES", "FEATURES", "Feature", "features_of"]

ENGINES = {"vllm": ("0.26", "0.33"), "sglang": ("0.5.17", "0.5.23")}
"""Package -> its supported releases."""

_ENGINE = "tests/hosts/test_vllm_engine.py"
_RUNS = "tests/hosts/test_vllm_runs.py"
_ADAPTER = "tests/hosts/vllm_adapter.py"
_MASKS = "tests/hosts/vllm_masks.py"
_STATES = "tests/hosts/vllm_states.py"
_SCHEDULING = "tests/hosts/vllm_scheduling.py"
_LATENT = "tests/hosts/vllm_latent_adapter.py"
_WARMUP = "tests/hosts/test_vllm_warmup.py"
_SGLANG = "tests/integrations/sglang/test_backend.py"
_TOKENS = f"{_ENGINE}::test_tokens_equal_transformers"
_PAGES = f"{_ENGINE}::test_tokens_over_pages_with_scales"
_MEDIA = f"{_ENGINE}::test_tokens_of_models_that_hear_or_see"
_CONNECTOR = f"{_ENGINE}::test_a_connector_saves_and_another_process_loads"
_RESULTS = "benchmarks/results/h200"
_LATER = "absent: 0.26 does not ask"


class Feature(NamedTuple):
    """One feature inside one engine.

    Attributes:
        engine: a package of `ENGINES`.
        name: of the feature.
        cells: for each release the file of a test and its function (`FILE::NAME`), the file of a
            GPU run, or a word and a reason: "refused: ...", "absent: ..." (the release has no such
            feature), "not run: ...", "not compared: ...".
    """

    engine: str
    name: str
    cells: tuple[str, ...]


def _both(cell: str) -> tuple[str, str]:
    return cell, cell


_VLLM = {
    "decoders, chunked prefill": _both(_TOKENS),
    "prefix caching": _both(f"{_ENGINE}::test_cached_prefixes_give_the_same_tokens"),
    "windows, soft caps, hybrid groups": _both(
        f"{_ENGINE}::test_layers_with_windows_have_a_cache_group_of_their_own"
    ),
    "sinks": _both(f"{_ADAPTER}::test_sinks_and_soft_cap"),
    "ALiBi": _both(f"{_ADAPTER}::test_alibi"),
    "ALiBi by the root of the distance": _both(f"{_MASKS}::test_alibi_by_the_root_of_the_distance"),
    "encoders": _both(f"{_ENGINE}::test_encoder_states_equal_transformers"),
    "cross-attention (Whisper)": _both(_MEDIA),
    "images (Gemma 3)": _both(_MEDIA),
    "non-causal drafts (DFlash)": (
        f"{_RUNS}::test_tokens_by_interpreted_triton_kernels",
        f"{_RUNS}::test_tokens_with_image_spans_and_drafts_by_interpreted_triton_kernels",
    ),
    "masks per request": _both(f"{_MASKS}::test_drafts_and_other_requests_in_one_batch"),
    "retained windows (R-SWA)": _both(f"{_MASKS}::test_retained_windows"),
    "layers that share a cache": _both(
        f"{_ADAPTER}::test_a_layer_that_shares_a_cache_does_not_write"
    ),
    "caches in NHD and HND order": _both(
        f"{_ENGINE}::test_tokens_over_a_cache_in_hnd_order_scheduled_step_by_step"
    ),
    "blocks of 16 to 64 tokens": _both(f"{_ENGINE}::test_block_size"),
    "fp8, a scale per tensor": _both(f"{_ADAPTER}::test_fp8_cache_with_scales_per_tensor"),
    "fp8, a scale per head": _both(f"{_MASKS}::test_scales_per_head"),
    "int8 and fp8 per token and head, nvfp4": _both(_PAGES),
    "int4 per group, mxfp4": ("refused: 0.26 takes no other names", _PAGES),
    "rotated formats": _both(_PAGES),
    "keys and values in different formats": ("refused: 0.26 takes no other names", _PAGES),
    "latent attention": _both(_TOKENS),
    "fp8 latents": _both(f"{_LATENT}::test_steps"),
    "sparse latents (DeepSeek V3.2)": _both(f"{_RUNS}::test_tokens_by_the_second_model_runner"),
    "gated delta nets of Qwen": _both(f"{_ENGINE}::test_state_layers_give_the_same_tokens"),
    "Mamba2": (
        "not run: CI serves it with 0.33",
        f"{_ENGINE}::test_state_layers_give_the_same_tokens",
    ),
    "state layers with drafts": (
        f"{_STATES}::test_steps_over_pages",
        f"{_ENGINE}::test_rejected_drafts_leave_no_trace_in_states",
    ),
    "other state layers": _both("absent: attnlib has no classes for them"),
    "verification of chains": _both(f"{_ENGINE}::test_verified_n_grams_give_the_same_tokens"),
    "query lengths decided on the device": (
        _LATER,
        f"{_SCHEDULING}::test_query_lengths_may_differ_on_the_host",
    ),
    "drafts that graphs update": (
        _LATER,
        f"{_SCHEDULING}::test_decodes_follow_lengths_and_blocks_in_place",
    ),
    "asynchronous scheduling": (
        f"{_RUNS}::test_tokens_by_interpreted_triton_kernels",
        f"{_RUNS}::test_tokens_with_image_spans_and_drafts_by_interpreted_triton_kernels",
    ),
    "metadata for several groups": _both(
        f"{_SCHEDULING}::test_another_group_takes_the_metadata_with_its_own_blocks"
    ),
    "cache written before attention": _both(f"{_ADAPTER}::test_metadata_has_no_slots"),
    "nothing compiled while serving": _both(f"{_WARMUP}::test_engine"),
    "second model runner": _both(f"{_RUNS}::test_tokens_by_the_second_model_runner"),
    "CUDA graphs": (
        f"{_RESULTS}/vllm_tokens.txt",
        f"{_RESULTS}/vllm_033_tokens.txt",
    ),
    "batch invariance": _both(
        f"{_SCHEDULING}::test_batch_invariant_layers_give_a_request_its_bits_in_any_batch"
    ),
    "tensor parallelism": _both(f"{_RUNS}::test_tokens_of_two_processes"),
    "decode context parallelism": (
        f"{_RUNS}::test_tokens_with_decode_context_parallelism",
        f"{_WARMUP}::test_masks_and_decode_context_parallelism",
    ),
    "decode context parallelism: windows, ALiBi, sinks, latents": _both(
        "tests/hosts/test_vllm_adapter.py::test_divided_layers"
    ),
    "drafts beside divided caches": (
        _LATER,
        f"{_ADAPTER}::test_drafts_with_a_cache_of_their_own_beside_a_divided_one",
    ),
    "decode context parallelism: masks by batch, pages with scales": _both(
        "refused: no code for them"
    ),
    "prefill context parallelism of latents": _both(f"{_RUNS}::test_tokens_of_two_processes"),
    "prefill context parallelism elsewhere": _both(
        "refused: vLLM divides no prompts of dense layers"
    ),
    "backend by kind of layer": _both(f"{_ENGINE}::test_backends_may_be_named_by_kind_of_layer"),
    "KV connectors, latents too": _both(_CONNECTOR),
    "KV connectors of sparse latents": _both("refused: ExampleConnector misreads them"),
    "quantized output": _both("refused: outputs are not quantized"),
    "vLLM's CPU platform": _both(
        f"{_ADAPTER}::test_vllms_own_cpu_platform_serves_what_the_user_names"
    ),
}
_GPU = f"{_RESULTS}/sglang_tokens.json"
_REAL = "tests/hosts/test_sglang.py::test_sglang_finds_attnlib_and_serves_its_batches"
_UNTRIED = "not run: only with 0.5.23"
_ABSENT = "absent: 0.5.17 does not ask"
_SGLANG_FEATURES = {
    "decoders, chunked prefill": (_GPU, f"{_SGLANG}::test_extend_decode_and_verify"),
    "windows, soft caps, sinks": _both(_REAL),
    "verification of chains": (_GPU, f"{_SGLANG}::test_extend_decode_and_verify"),
    "CUDA graphs": (_GPU, f"{_SGLANG}::test_captured_metadata_follows_later_batches"),
    "plug-in": _both(_REAL),
    "deterministic mode": (
        _REAL,
        f"{_SGLANG}::test_deterministic_mode_selects_batch_invariance",
    ),
    "lengths on the device only": (
        _UNTRIED,
        f"{_SGLANG}::test_batches_without_lengths_on_the_host",
    ),
    "latent attention": (_UNTRIED, f"{_SGLANG}::test_latents"),
    "cache written by SGLang": (
        _ABSENT,
        f"{_SGLANG}::test_an_operation_of_sglang_may_write_the_pool",
    ),
    "fp8 pools": _both(_REAL),
    "speculation trees": _both(_REAL),
    "drafts in blocks (DFlash)": (_ABSENT, f"{_SGLANG}::test_drafts_in_blocks_see_each_other"),
    "EAGLE drafts in chains": ("refused: `DraftBackendFactory` knows fixed names", _REAL),
    "metadata inside graphs": _both(f"{_SGLANG}::test_graphs_record_lengths_and_slots"),
    "gpt-oss, Llama 4, EXAONE 4": ("refused: SGLang lists their backends", _REAL),
    "Gemma 4": _both("refused: SGLang lists its backends"),
    "images (Gemma 3)": _both("absent: causal unless with `triton`"),
    "cross-attention": _both("refused: no adapter"),
    "decode context parallelism": _both("refused: no adapter"),
    "pools for windows": _both("refused: `--disable-hybrid-swa-memory`"),
    # GDNKernelDispatcher (gdn_backend.py:139 in 0.5.17, :296 in 0.5.23) raises for other names.
    "state layers": _both("refused: SGLang lists their kernels"),
}
FEATURES = (
    *(Feature("vllm", name, cells) for name, cells in _VLLM.items()),
    *(Feature("sglang", name, cells) for name, cells in _SGLANG_FEATURES.items()),
)


def features_of(engine: str, version: str) -> dict[str, str]:
    """Feature -> cell, for an installed version of an engine; empty for releases that are not
    supported.

    Args:
        engine: a package of `ENGINES`.
        version: its version, for example "0.33.0".
    """
    for column, release in enumerate(ENGINES[engine]):
        if version == release or version.startswith(f"{release}."):
            return {row.name: row.cells[column] for row in FEATURES if row.engine == engine}
    return {}
