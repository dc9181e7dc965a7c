"""vLLM's layer over impls in vLLM's style; tests/compat/seeds compares it with its original."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnlib.backends.flash_attn import FlashAttnBackend
from attnlib.backends.torch import TorchBackend
from attnlib.compat import vllm
from attnlib.compat.vllm.backends.abstract import AttentionImpl
from attnlib.compat.vllm.direct_layer import DirectLayer
from attnlib.errors import BackendUnavailableError
from tests.compat.vllm import styles
from tests.compat.vllm.styles import SPEC, STEPS, common_of, tokens

SOURCES = (
    styles.Backend, styles.FlatBackend, styles.BlocksFirst, styles.Packed, styles.SizedBackend,
)  # fmt: skip
CACHE = (8, 16, 2, 32)


def outputs(backend: Any, **more: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Those of three steps through vLLM's layer, and the cache."""
    torch.manual_seed(0)
    layer = vllm.Attention(4, 32, 0.2, 2, attn_backend=backend, **more)
    layer.kv_cache = [torch.zeros(backend.get_kv_cache_shape(*CACHE))]
    found = []
    for lengths in STEPS:
        built: Any = styles.Plan(common_of(*lengths))
        if not isinstance(layer.layer, DirectLayer):
            built = layer.layer.backend.make_builder(SPEC, "cpu").build(0, built.common)
        with vllm.set_forward_context(built):
            found.append(layer(*(x.flatten(1) for x in tokens(sum(lengths[0])))))
    return found, layer.kv_cache[0]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_an_impl_of_vllm_runs(source: Any) -> None:
    """With metadata of any class and a cache of any shape; the impl writes the keys."""
    (ours, cache), (theirs, _) = outputs(source), outputs(TorchBackend)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    assert cache.any()


@pytest.mark.parametrize("source", [styles.Backend, styles.SizedBackend])
def test_extra_arguments_reach_the_impl(source: Any) -> None:
    layer = vllm.Attention(4, 32, 0.2, 2, attn_backend=source, own=[1], other="x")
    assert layer.impl.extra == {"own": [1], "other": "x"}
    assert type(layer.impl) is source.get_impl_cls() and layer.attn_backend is source
    assert layer.get_attn_backend() is source


def test_a_profiling_run_does_not_call_the_impl() -> None:
    layer = vllm.Attention(4, 32, 0.2, 2, attn_backend=styles.Backend)
    q, k, v = (x.flatten(1) for x in tokens(3))
    with vllm.set_forward_context(None):
        assert layer(q, k, v).shape == (3, 128) and not layer(q, k, v).any()
        assert layer(q, k, v, torch.Size([3, 4, 32])).shape == (3, 4, 32)


def test_rows_that_the_impl_does_not_write_are_0() -> None:
    layer = vllm.Attention(4, 32, 0.2, 2, attn_backend=styles.Backend)
    layer.kv_cache = [torch.zeros(2, *CACHE)]
    with vllm.set_forward_context(styles.Plan(common_of([3, 1], [3, 1]))):
        out = layer(*(x.flatten(1) for x in tokens(6)))
    assert out[:4].any(1).all() and not out[4:].any()


def test_keys_that_the_cache_holds_already() -> None:
    """As of a layer that shares the cache of another one."""
    torch.manual_seed(0)
    layer = vllm.Attention(4, 32, 0.2, 2, attn_backend=styles.Backend)
    layer.kv_cache = [torch.zeros(2, *CACHE)]
    q, k, v = tokens(12)
    with vllm.set_forward_context(styles.Plan(common_of([5, 7], [5, 7]))):
        first = layer(q, k, v)
        assert torch.equal(layer(q, None, None), first)


def test_no_tokens() -> None:
    layer = vllm.Attention(4, 32, 0.2, 2, attn_backend=styles.Backend)
    layer.kv_cache = [torch.zeros(2, *CACHE)]
    with vllm.set_forward_context(styles.Plan(common_of([0, 0], [0, 0]))):
        assert layer(*(x.flatten(1) for x in tokens(0))).shape == (0, 128)


def test_scales_of_a_checkpoint_and_of_a_step() -> None:
    """The impl reads them from the layer."""
    config = SimpleNamespace(cache_dtype="fp8", block_size=16, calculate_kv_scales=True)
    layer = vllm.Attention(4, 32, 0.2, 2, cache_config=config, attn_backend=styles.Backend)
    q, k, v = tokens(3)
    layer.calc_kv_scales(q, k, v)
    scales = [float(x.abs().max()) / 448 for x in (k, v)]
    assert [float(layer._k_scale), float(layer._v_scale)] == pytest.approx(scales)
    assert float(layer._q_scale) == 1.0 and not layer.calculate_kv_scales
    layer.k_scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
    layer.process_weights_after_loading(torch.float32)
    assert [float(layer._k_scale), float(layer._v_scale)] == [0.5, 0.5]
    assert "_k_scale" not in layer.state_dict()


def test_the_base_class_of_impls_is_abstract() -> None:
    class Empty(AttentionImpl[Any]):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Empty(4, 32, 0.2)
    assert vllm.Attention(4, 32, 0.2, 2, attn_backend=styles.Backend).extra_repr() == (
        "num_heads=4, num_kv_heads=2, head_size=32, backend=Backend"
    )


def test_a_backend_that_is_not_installed_is_reported_by_selection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> Any:
        raise ImportError("no package")

    monkeypatch.setattr(FlashAttnBackend, "get_impl_cls", staticmethod(missing))
    with pytest.raises(BackendUnavailableError):
        vllm.Attention(4, 32, 0.2, 2, attn_backend=FlashAttnBackend, dtype=torch.float16)


def test_a_backend_by_name() -> None:
    layer = vllm.Attention(4, 32, 0.2, 2, attn_backend="torch")
    assert layer.attn_backend is layer.get_attn_backend() is TorchBackend


def test_an_impl_that_is_a_module_is_a_part_of_the_layer() -> None:
    class Module(styles.Impl, torch.nn.Module):
        def __init__(self, *given: Any) -> None:
            torch.nn.Module.__init__(self)
            styles.Impl.__init__(self, *given)
            self.weight = torch.nn.Parameter(torch.ones(3))

    class Source(styles.Backend):
        impl = Module

    layer = vllm.Attention(4, 32, 0.2, 2, attn_backend=Source)
    assert list(layer.state_dict()) == ["impl.weight"]
    assert copy.deepcopy(layer).impl is not layer.impl
