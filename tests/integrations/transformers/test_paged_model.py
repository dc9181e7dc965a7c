"""`PagedModel`: steps over paged caches equal plain forwards, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import attnlib
from attnlib.cache.storage import PagedKVCache
from attnlib.cli.demo.plain_blocks import PlainBlocks
from attnlib.cli.demo.result import check_tokens
from attnlib.cli.demo.scheduler import Request, Scheduler
from attnlib.cli.demo.serve import serve
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.workspace import BatchLimits
from tests.integrations.tiny_models import (
    DECODERS,
    VOCABULARY,
    decoder,
    deepseek_v3,
    gemma3_with_images,
    llama4,
    nemotron,
    prompts,
    randomized,
    stablelm,
)
from tests.integrations.transformers_sweep import tiny

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def cohere2() -> Any:
    """A decoder with windows in every other layer."""
    return randomized(
        hf.Cohere2ForCausalLM(
            hf.Cohere2Config(
                **_SIZES, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
            )
        )
    )


MODELS = {
    **{name: (lambda name=name: decoder(name)) for name in DECODERS},
    "cohere2": cohere2,
    "llama4": lambda: llama4(attn_temperature_tuning=False),
    "deepseek_v3": deepseek_v3,
    "gemma3_with_images": gemma3_with_images,
}


def _served(
    model: Any,
    backend: str,
    lengths: tuple[int, ...] = (3, 9, 21),
    new_tokens: int = 6,
    **kwargs: Any,
) -> tuple[PagedModel, Any]:
    """Run prompts with a common prefix through a small scheduler: the model and the comparison."""
    common = prompts(17, seed=3)[0]
    requests = [
        Request(index, common + prompt, new_tokens)
        for index, prompt in enumerate(prompts(*lengths))
    ]
    paged = PagedModel(model, num_blocks=32, block_size=8, backend=backend, **kwargs)
    served = serve(paged, Scheduler(PlainBlocks(32, 8), 16, 8), requests)
    assert sum(request.num_reused for request in requests) > 0
    return paged, check_tokens(model, requests, served.logits)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logits_equal_the_plain_model(name: str) -> None:
    """Chunked prefill, prefix reuse and decodes, with windows, soft caps, sinks and chunks."""
    _, result = _served(MODELS[name](), "torch")
    assert result.passed and result.tokens == 18, str(result)


@pytest.mark.slow
def test_through_triton() -> None:
    """The same on triton: sinks, and a window in every other layer."""
    paged, result = _served(decoder("gpt_oss"), "triton", lengths=(3, 9), new_tokens=3)
    assert result.passed, str(result)
    assert {layer.backend.get_name() for layer, _ in paged.layers()} == {"triton"}


def test_layers_of_one_spec_share_a_builder() -> None:
    paged, result = _served(
        decoder("gpt_oss"),
        "torch",
        limits=BatchLimits(max_num_reqs=8, max_num_tokens=16, max_seq_len=64),
    )
    assert result.passed
    assert sorted(spec.sliding_window or 0 for spec in paged.specs) == [0, 5] and all(
        spec.has_sink for spec in paged.specs
    )
    layers = [layer for layer, _ in paged.layers()]
    assert paged.builder_of(layers[0]) is not paged.builder_of(layers[1])
    assert paged.cache_bytes == sum(
        c.key_cache.nbytes + c.value_cache.nbytes for _, c in paged.layers()
    )
    llama, _ = _served(decoder("llama"), "torch")
    assert len({id(llama.builder_of(layer)) for layer, _ in llama.layers()}) == 1 and list(
        llama.specs.values()
    ) == [2]


def test_a_quantized_cache_is_used() -> None:
    """The logits differ from float32 by a quantization error, so the cache is quantized."""
    model = decoder("llama")
    paged, result = _served(model, "torch", kv_cache_dtype="fp8_e4m3")
    assert paged.layers()[0][1].key_cache.dtype is torch.float8_e4m3fn
    assert 1e-4 < result.largest_error < 1.0


@pytest.mark.parametrize(
    ("name", "most"),
    [("int8_per_token_head", 0.05), ("fp8_per_token_head", 0.5), ("int4_per_group", 2.0)],
)
def test_pages_with_scales_are_served(name: str, most: float) -> None:
    """P13: prefix reuse, chunked prefills and decodes over pages; errors follow the format."""
    paged, result = _served(decoder("llama"), "torch", kv_cache_dtype=name)
    cache = paged.layers()[0][1]
    assert cache.pages is not None and cache.page_format is not None
    assert cache.page_format.name == name
    assert paged.cache_bytes < 2 * sum(c.pages.nbytes for _, c in paged.layers())
    assert 1e-5 < result.largest_error < most


def test_the_model_is_restored_afterwards() -> None:
    model = decoder("llama")
    model.set_attn_implementation("sdpa")
    paged = PagedModel(model, num_blocks=4)
    with pytest.raises(RuntimeError, match="stop"), paged.attached():
        assert model.config._attn_implementation == "attnlib"
        raise RuntimeError("stop")
    assert model.config._attn_implementation == "sdpa"


def _one_step(model: Any, **kwargs: Any) -> torch.Tensor:
    paged = PagedModel(model, num_blocks=4, backend="torch")
    batch = attnlib.CommonAttentionMetadata.from_lengths([3], [3], [[0]], 16, "cpu")
    with paged.attached(), torch.no_grad():
        from attnlib.integrations.transformers.paged_model import PagedStep

        return model(
            torch.tensor([[5, 6, 7]]),
            use_cache=False,
            attnlib_step=PagedStep(paged, batch),
            **kwargs,
        ).logits


def test_a_padding_mask_is_refused() -> None:
    """It would be ignored: block table and lengths define the keys."""
    with pytest.raises(
        UnsupportedConfigError,
        match=r"LlamaAttention\.0: the mask of this step is not composed of causality",
    ):
        _one_step(decoder("llama"), attention_mask=torch.tensor([[0, 1, 1]]))


def test_a_callers_own_mask_is_refused() -> None:
    with pytest.raises(UnsupportedConfigError, match="or a mask of the caller's own"):
        _one_step(decoder("llama"), attention_mask=torch.zeros(1, 1, 3, 3))


def test_a_layer_that_is_not_causal_is_refused() -> None:
    model = decoder("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(UnsupportedConfigError, match=r"LlamaAttention\.0 is not causal"):
        _one_step(model)


def test_queries_scaled_by_their_index_in_the_row_are_refused() -> None:
    with pytest.raises(UnsupportedConfigError, match="attn_temperature_tuning"):
        PagedModel(llama4(attn_temperature_tuning=True), num_blocks=4)


@pytest.mark.parametrize("kind", ["linear_attention", "hybrid", "conv"])
def test_models_with_recurrent_states_are_refused(kind: str) -> None:
    """Their states would start anew in each step, and the tokens would be wrong."""
    model = decoder("llama")
    model.config.layer_types = ["full_attention", kind]
    with pytest.raises(UnsupportedConfigError, match=f"layers of type {kind}, whose states"):
        PagedModel(model, num_blocks=4)


_SELECTED = "(indexed|deepseek_sparse)_attention, whose index keys"  # the second up to 5.17
OUTSIDE_THE_CACHE = {
    "axk2": ("AXK2ForCausalLM", _SELECTED),
    "deepseek_v32": ("DeepseekV32ForCausalLM", _SELECTED),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        "heavily_compressed_attention, whose compressed entries",
    ),
    "dots3_note": ("Dots3NoteForCausalLM", _SELECTED),
    "glm5_next": ("Glm5NextForConditionalGeneration", "(linear|indexed)_attention, whose [a-z ]+"),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", _SELECTED),
    "hy_v4": ("HYV4ForCausalLM", _SELECTED),
    "hy_v4_vl": ("HYV4VLForConditionalGeneration", _SELECTED),
    "jamba": ("JambaForCausalLM", "[a-z_]+, whose states"),
    "minimax_m3_vl_text": ("MiniMaxM3VLForCausalLM", "minimax_m3_sparse, whose index keys"),
    "mistral_large4": (
        "MistralLarge4ForConditionalGeneration",
        _SELECTED,
    ),
    "qwen4_exp": ("Qwen4ExpForCausalLM", "linear_attention, whose states"),
}


@pytest.mark.parametrize("name", OUTSIDE_THE_CACHE)
def test_families_whose_layers_keep_more_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that select keys, with compressed entries and with states, before any allocation."""
    allocated: list[Any] = []
    monkeypatch.setattr(PagedKVCache, "allocate", lambda *args, **kwargs: allocated.append(args))
    class_name, kind = OUTSIDE_THE_CACHE[name]
    if name not in hf.CONFIG_MAPPING:
        pytest.skip(f"transformers {hf.__version__} has no {name}")
    message = f"{class_name} has layers of type {kind} are not in a paged KV cache: use generate "
    model = tiny.build(name, class_name)
    for latents in (None, True):
        with pytest.raises(UnsupportedConfigError, match=f"{message}with attn_implementation='at"):
            PagedModel(model, num_blocks=4, latents=latents)
    assert not allocated


def test_a_block_that_does_not_exist_is_named() -> None:
    """Errors of the contract pass through the model."""
    paged = PagedModel(decoder("llama"), num_blocks=4, backend="torch")
    batch = attnlib.CommonAttentionMetadata.from_lengths([3], [3], [[9]], 16, "cpu")
    with pytest.raises(ContractError, match="9"), paged.attached():
        paged.step(torch.tensor([5, 6, 7]), torch.arange(3), batch)


@pytest.mark.parametrize("model", [stablelm, nemotron])
def test_a_step_that_does_not_reach_the_layers_is_refused(model: Any) -> None:
    """The layers of these models lose keyword arguments, and with them the paged step."""
    paged = PagedModel(model(), num_blocks=4, backend="torch")
    batch = attnlib.CommonAttentionMetadata.from_lengths([3], [3], [[0]], 16, "cpu")
    with pytest.raises(UnsupportedConfigError, match="does not pass the arguments of a paged step"):
        with paged.attached():
            paged.step(torch.tensor([5, 6, 7]), torch.arange(3), batch)


def test_a_layer_that_stops_attending_is_noticed() -> None:
    """A step that reaches fewer layers than the step before is an error."""
    model = decoder("llama")
    paged = PagedModel(model, num_blocks=4, backend="torch")
    batch = attnlib.CommonAttentionMetadata.from_lengths([3], [3], [[0]], 16, "cpu")
    tokens, positions = torch.tensor([5, 6, 7]), torch.arange(3)
    with paged.attached():
        paged.step(tokens, positions, batch)
        attention = model.model.layers[1].self_attn
        attention.forward = lambda hidden_states, **_: (hidden_states, None)
        with pytest.raises(
            UnsupportedConfigError, match="reached 1 of 2 attention and state layers"
        ):
            paged.step(tokens, positions, batch)


def test_a_step_outside_of_attached_is_named() -> None:
    paged = PagedModel(decoder("llama"), num_blocks=4, backend="torch")
    batch = attnlib.CommonAttentionMetadata.from_lengths([3], [3], [[0]], 16, "cpu")
    with pytest.raises(UnsupportedConfigError, match="call step within `with paged.attached"):
        paged.step(torch.tensor([5, 6, 7]), torch.arange(3), batch)


def test_numbers_and_indices_of_another_kind_are_refused() -> None:
    model = decoder("llama")
    for sizes, message in (
        ({"num_blocks": 0}, "num_blocks=0 must be at least 1"),
        ({"num_blocks": 1.5}, "num_blocks 1.5 is a float"),
        ({"num_blocks": 4, "block_size": 0}, "block_size=0 must be at least 1"),
        ({"num_blocks": 4, "kv_cache_dtype": "fp3"}, "kv_cache_dtype='fp3' is not known"),
        ({"num_blocks": 4, "value_cache_dtype": "a:b"}, "no KV format is named 'a:b'"),
        ({"num_blocks": 4, "kv_rotation": "turned"}, "kv_rotation='turned' is not known"),
    ):
        with pytest.raises(ContractError, match=message):
            PagedModel(model, **sizes)
    for other in ("meta-llama/Llama-3.2-1B", model.config):
        with pytest.raises(ContractError, match="PagedModel takes a loaded model"):
            PagedModel(other, num_blocks=4)
    paged = PagedModel(model, num_blocks=4, backend="torch")
    batch = attnlib.CommonAttentionMetadata.from_lengths([3], [3], [[0]], 16, "cpu")
    tokens, positions = torch.tensor([5, 6, 7]), torch.arange(3)
    with paged.attached():
        with pytest.raises(ContractError, match="input_ids is torch.float32; it must hold indices"):
            paged.step(tokens.float(), positions, batch)
        for rows, message in (
            (torch.tensor([1.0]), "rows is torch.float32; it must hold indices"),
            (torch.ones(3, dtype=torch.bool), "rows is torch.bool; it must hold indices"),
            (torch.tensor(1), r"rows has shape \[\]; it must be \[n\]"),
        ):
            with pytest.raises(ContractError, match=message):
                paged.step(tokens, positions, batch, rows)
