"""Models with multi-head latent attention over latent caches: `PagedModel` and `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.cli.demo.plain_blocks import PlainBlocks
from attnlib.cli.demo.result import check_tokens
from attnlib.cli.demo.scheduler import Request, Scheduler
from attnlib.cli.demo.serve import serve
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.latents import has_latents, unexpanded
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.mla.latent_attention import LatentAttention
from tests.integrations.tiny_models import decoder, deepseek_v3, prompts
from tests.integrations.transformers_sweep.tiny import build

FAMILIES = {
    "axk1": "AXK1ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "longcat_flash": "LongcatFlashForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "sarvam_mla": "DeepseekV3ForCausalLM",
    "youtu": "YoutuForCausalLM",
}


def _served(model: Any, **options: Any) -> tuple[PagedModel, Any]:
    """Requests with a common prefix through chunked prefills, reuse and decodes."""
    common = prompts(17, seed=3)[0]
    requests = [Request(i, common + more, 4) for i, more in enumerate(prompts(3, 9, 21))]
    paged = PagedModel(
        model, num_blocks=32, block_size=8, **{"backend": "torch", "latents": True, **options}
    )
    served = serve(paged, Scheduler(PlainBlocks(32, 8), 16, 8), requests)
    assert sum(request.num_reused for request in requests) > 0
    return paged, check_tokens(model, requests, served.logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_run_over_latents(family: str) -> None:
    """M12: tokens equal those of the plain model, and every attention layer keeps latents."""
    paged, result = _served(build(family, FAMILIES[family]))
    assert result.passed and result.tokens == 12, str(result)
    assert all(cache.values_alias_keys for _, cache in paged.layers())


@pytest.mark.parametrize("expand_from", [None, 1])
def test_latents_need_less_memory(expand_from: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: 24 elements per token instead of four heads of 24 and 16; both forms of prefills."""
    defaults = dict(LatentAttention.__init__.__kwdefaults__ or {})
    monkeypatch.setattr(
        LatentAttention.__init__, "__kwdefaults__", {**defaults, "expand_from": expand_from}
    )
    paged, result = _served(deepseek_v3())
    assert result.passed, str(result)
    (spec,) = paged.specs
    assert spec.use_mla and (spec.num_kv_heads, spec.head_size, spec.head_size_v) == (1, 24, 16)
    expanded, result = _served(deepseek_v3(), latents=False)
    assert result.passed and not any(spec.use_mla for spec in expanded.specs)
    assert paged.cache_bytes * (4 * (24 + 16)) == expanded.cache_bytes * 24
    assert paged.expanded_cache_bytes == expanded.cache_bytes == expanded.expanded_cache_bytes


@pytest.mark.slow
def test_latents_through_triton() -> None:
    """The default where the backend supports latents."""
    paged, result = _served(deepseek_v3(), backend="triton", latents=None)
    assert result.passed, str(result)
    assert {layer.backend.get_name() for layer, _ in paged.layers()} == {"triton"}
    assert all(spec.use_mla for spec in paged.specs)


def test_a_quantized_latent_cache() -> None:
    """M9: one scale for both; the logits differ by a quantization error."""
    paged, result = _served(deepseek_v3(), kv_cache_dtype="fp8_e4m3")
    assert paged.layers()[0][1].dtype is torch.float8_e4m3fn
    assert 1e-4 < result.largest_error < 1.0


def test_models_without_latents() -> None:
    with pytest.raises(UnsupportedConfigError, match="LlamaForCausalLM: no attention module has"):
        PagedModel(decoder("llama"), num_blocks=4, latents=True)


def test_the_modules_are_restored() -> None:
    """`expand_kv` returns latents in the context only."""
    model = deepseek_v3()
    module = model.model.layers[0].self_attn
    latent, rotary = torch.randn(1, 1, 3, 16), torch.randn(1, 1, 3, 8)
    before = module.expand_kv(latent, rotary)
    with pytest.raises(RuntimeError, match="stop"), unexpanded([module]):
        key, value = module.expand_kv(latent, rotary)
        assert torch.equal(key, torch.cat((latent, rotary), -1)) and torch.equal(value, latent)
        raise RuntimeError("stop")
    for states, again in zip(before, module.expand_kv(latent, rotary), strict=True):
        assert torch.equal(states, again)


def test_only_the_known_expansion_is_replaced() -> None:
    """Other expansions, biases and quantized weights keep keys and values of every head."""
    module = deepseek_v3().model.layers[0].self_attn
    assert has_latents(module)
    expand = module.expand_kv
    module.expand_kv = lambda latent, rotary: tuple(2 * x for x in expand(latent, rotary))
    assert not has_latents(module)
    del module.expand_kv
    module.indexer = torch.nn.Identity()  # selects keys
    assert not has_latents(module)
    module.indexer = None
    module.kv_b_proj = torch.nn.Linear(16, 4 * 32, bias=True)
    assert not has_latents(module)
