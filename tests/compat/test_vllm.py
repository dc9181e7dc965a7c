"""vLLM's layer, context and runner classes; tests/compat/seeds has their ordinary use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.compat import vllm
from attnlib.compat.vllm import backend_utils, selector
from attnlib.errors import ContractError
from attnlib.selection.vllm_arguments import spec_from_vllm_arguments


def make_layer(**more: object) -> vllm.Attention:
    return vllm.Attention(4, 32, 0.2, 2, prefix="layers.0", attn_backend=TorchBackend, **more)


def make_metadata(layer: vllm.Attention, **fields: object) -> object:
    common = attnlib.CommonAttentionMetadata.from_lengths([3], [3], [[1]], 16, "cpu")
    built = TorchBackend.make_builder(layer.layer.spec, "cpu").build(0, common)
    for name, value in fields.items():
        setattr(built, name, value)
    return built


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(3, 128), torch.randn(3, 64), torch.randn(3, 64)


def test_a_layer_needs_a_context() -> None:
    layer = make_layer()
    with pytest.raises(ContractError, match="no forward context is set"):
        layer(*tensors())
    with (
        vllm.set_forward_context({"layers.1": make_metadata(layer)}),
        pytest.raises(ContractError, match="none of layer 'layers.0'"),
    ):
        layer(*tensors())
    with pytest.raises(ContractError):
        vllm.get_forward_context()


def test_a_layer_needs_a_cache() -> None:
    layer = make_layer()
    with (
        vllm.set_forward_context(make_metadata(layer)),
        pytest.raises(ContractError, match=r"has shape \(0,\); assign layer.kv_cache"),
    ):
        layer(*tensors())


def test_the_cache_of_the_virtual_engine_is_used() -> None:
    """A tensor is wrapped once; a PagedKVCache is used as it is."""
    layer, (q, k, v) = make_layer(), tensors()
    shape = TorchBackend.get_kv_cache_shape(2, 16, 2, 32)
    layer.kv_cache = [
        torch.zeros(shape), attnlib.PagedKVCache.allocate(layer.layer.spec, 2, "cpu"),
    ]  # fmt: skip
    results = []
    for engine in (0, 1, 0):
        with vllm.set_forward_context(make_metadata(layer), virtual_engine=engine):
            results.append(layer(q, k, v))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert torch.equal(layer.kv_cache[0][0], layer.kv_cache[1].key_cache)


def test_scales_are_computed_only_where_the_cache_config_says_so() -> None:
    """The flag of the batch alone is not enough, as in vLLM."""
    for wanted in (False, True):
        config = SimpleNamespace(cache_dtype="fp8", block_size=16, calculate_kv_scales=wanted)
        layer = make_layer(cache_config=config)
        shape = TorchBackend.get_kv_cache_shape(2, 16, 2, 32)
        layer.kv_cache = [torch.zeros(shape, dtype=torch.uint8)]
        with vllm.set_forward_context(make_metadata(layer, enable_kv_scales_calculation=True)):
            layer(*tensors())
        assert (float(layer.layer.k_scale) != 1.0) is wanted
        assert layer.calculate_kv_scales is False


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected arguments window_size"):
        make_layer(window_size=3)
    with pytest.raises(TypeError, match="need kv_lora_rank"):
        make_layer(q_lora_rank=3)


def test_objects_without_what_attnlib_reads() -> None:
    """The message names the attribute and its owner."""
    with pytest.raises(ContractError, match="has no attribute 'model_config'"):
        backend_utils.make_builder(TorchBackend, SimpleNamespace(), SimpleNamespace(), "cpu")
    with pytest.raises(ContractError, match="has no attribute 'compilation_config'"):
        backend_utils.get_per_layer_parameters(SimpleNamespace())
    model = SimpleNamespace(
        get_num_attention_heads=lambda _: 4, get_num_kv_heads=lambda _: 2,
        get_head_size=lambda: 32, dtype=torch.float32,
    )  # fmt: skip
    runner = SimpleNamespace(
        model_config=model, block_size=16, attn_backend=TorchBackend, device="cpu",
        max_batchsize_to_capture=2, max_seq_len_to_capture=32,
    )  # fmt: skip
    with pytest.raises(ContractError, match="is a NoneType; it must be what a builder"):
        vllm.AttentionState(runner).begin_forward(SimpleNamespace(attn_metadata=None))


def test_a_batch_keeps_its_class_when_it_is_replaced() -> None:
    starts, lens = torch.tensor([0, 2]).int(), torch.tensor([2]).int()
    batch = backend_utils.CommonAttentionMetadata(
        starts, starts, lens, lens, lens - 2, 1, 2, 2, None, None
    )
    assert type(batch.replace(max_seq_len=9)) is backend_utils.CommonAttentionMetadata
    assert batch.max_seq_len == 2 and batch.replace(max_seq_len=9).max_seq_len == 9


def test_every_argument_of_the_selection_is_in_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def select(*arguments: object) -> type[TorchBackend]:
        asked.append(spec_from_vllm_arguments(arguments, {}))
        return TorchBackend

    monkeypatch.setattr(selector, "select", select)
    vllm.get_attn_backend(64, torch.bfloat16, "fp8", 32, has_sink=True)
    vllm.get_attn_backend(576, torch.float16, None, 64, use_mla=True)
    vllm.get_attn_backend(64, torch.bfloat16, "auto", 16, is_attention_free=True)
    sinks, latent, none = asked
    assert none is None and sinks is not None and latent is not None
    assert (sinks.head_size, sinks.dtype, sinks.block_size) == (64, torch.bfloat16, 32)
    assert sinks.kv_dtype == torch.float8_e4m3fn and sinks.has_sink and not sinks.use_mla
    assert (latent.head_size, latent.kv_dtype, latent.block_size) == (576, torch.float16, 64)
    assert latent.use_mla and not latent.has_sink


def test_the_layout_override_is_a_name_of_the_module() -> None:
    assert backend_utils._KV_CACHE_LAYOUT_OVERRIDE is None
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        backend_utils.missing  # noqa: B018  # the access raises


def test_a_quantized_cache_of_a_backend_of_attnlib() -> None:
    """Its dtype, block size and scales, from the cache config, the step and the checkpoint."""

    class Method:
        def create_weights(self, layer: vllm.Attention) -> None:
            layer.k_scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
            layer.v_scale = torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)

    config = SimpleNamespace(cache_dtype="fp8", block_size=32, calculate_kv_scales=True)
    quant = SimpleNamespace(get_quant_method=lambda layer, prefix: Method())
    layer = make_layer(cache_config=config, quant_config=quant)
    assert (layer.layer.spec.kv_dtype, layer.layer.spec.block_size) == (torch.float8_e4m3fn, 32)
    query, key, value = tensors()
    layer.calc_kv_scales(query, key, value)
    for scale, x in ((layer.layer.k_scale, key), (layer.layer.v_scale, value)):
        assert float(scale) == pytest.approx(float(x.abs().max()) / 448)
    layer.process_weights_after_loading(torch.float32)  # the checkpoint has a scale of keys only
    assert float(layer.layer.k_scale) == float(layer.layer.v_scale) == 0.5
    for config in (None, SimpleNamespace(cache_dtype="int8_per_token_head", block_size=16)):
        plain = make_layer(cache_config=config, quant_config=quant)
        plain.process_weights_after_loading(torch.float32)
        assert float(plain.layer.k_scale) == 1.0


def test_parameters_of_layers_on_backends_of_attnlib() -> None:
    layers = {"0": make_layer(), "1": make_layer(per_layer_sliding_window=8), "mlp": object()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    found = backend_utils.get_per_layer_parameters(config, TorchBackend.get_impl_cls())
    assert {name: (one.window_left, one.sm_scale) for name, one in found.items()} == {
        "0": (-1, 0.2),
        "1": (7, 0.2),
    }
    with pytest.raises(AssertionError):
        backend_utils.infer_global_hyperparameters(found)


def test_builders_of_attnlib_from_arguments_of_vllm() -> None:
    """Requests of up to 8 tokens are decodes of the torch backend."""
    spec = SimpleNamespace(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    model = SimpleNamespace(get_num_attention_heads=lambda parallel: 4, dtype=torch.float32)
    config = SimpleNamespace(model_config=model)
    builder = backend_utils.make_builder(TorchBackend, spec, config, "cpu")
    starts, lens = torch.tensor([0, 1, 6, 16]), torch.tensor([9, 5, 10])
    batch = backend_utils.CommonAttentionMetadata(
        starts, starts, lens, lens, torch.tensor([8, 0, 0]), 3, 16, 10,
        torch.tensor([[1], [2], [3]]), torch.arange(18),
    )  # fmt: skip
    built = builder.build(0, batch)
    assert (built.num_decodes, built.num_prefills, built.num_prefill_tokens) == (2, 1, 10)
