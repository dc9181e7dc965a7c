"""Backends in vLLM's style in layers of attnlib, in the registry, in graphs and under test."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import attnlib
import attnlib.testing
from attnlib.compat.vllm import adapt_backend
from attnlib.compat.vllm.runner import AttentionMetadataBuilder as RunnerBuilder
from attnlib.errors import ContractError, RegistrationError, UnsupportedConfigError
from attnlib.selection import unregister_backend
from attnlib.testing.outcome import Outcome
from tests.compat.vllm import styles
from tests.compat.vllm.styles import BLOCK, KV_HEADS, SIZE, SPEC, STEPS, common_of, tokens

SOURCES = (
    styles.Backend, styles.FlatBackend, styles.BlocksFirst, styles.SizedBackend,
)  # fmt: skip


def outputs(backend: Any, spec: attnlib.AttentionSpec = SPEC, **more: Any) -> list[torch.Tensor]:
    """Those of three steps, and the keys and values in the cache at the end."""
    torch.manual_seed(0)
    layer = attnlib.Attention(spec, backend=backend, device="cpu", **more)
    cache = attnlib.PagedKVCache.allocate(
        spec, 8, "cpu", layout=layer.backend.capabilities.kv_cache_layouts[0].replace("ANY", "NHD")
    )
    builder = layer.backend.make_builder(spec, "cpu")
    found = []
    for lengths in STEPS:
        metadata = builder.build(0, common_of(*lengths))
        found.append(layer(*tokens(sum(lengths[0])), cache, metadata))
    return [*found, cache.key_cache, cache.value_cache]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_an_adapted_backend_computes_what_others_compute(source: Any) -> None:
    for ours, theirs in zip(outputs(adapt_backend(source)), outputs("torch"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_the_layout_is_that_of_the_source() -> None:
    found = [adapt_backend(source).capabilities.kv_cache_layouts for source in SOURCES]
    assert found == [("NHD",), ("NHD",), ("HND_INTERLEAVED",), ("NHD",)]

    class Reordered(styles.BlocksFirst):
        @staticmethod
        def get_kv_cache_stride_order() -> tuple[int, ...]:
            return (1, 0, 3, 2, 4)  # keys and values apart, tokens before heads

    assert adapt_backend(Reordered).capabilities.kv_cache_layouts == ("NHD",)
    assert_same_as_torch(adapt_backend(Reordered))


def assert_same_as_torch(backend: Any, spec: attnlib.AttentionSpec = SPEC, **more: Any) -> None:
    for ours, theirs in zip(
        outputs(backend, spec, **more), outputs("torch", spec, **more), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_features_are_those_that_are_stated() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    for changes, more in (
        ({"sliding_window": 3}, {}),
        ({"logits_soft_cap": 5.0}, {}),
        ({"has_alibi": True}, {"alibi_slopes": slopes}),
    ):
        spec = SPEC.replace(**changes)
        with pytest.raises(UnsupportedConfigError):
            attnlib.Attention(spec, backend=adapt_backend(styles.Backend), device="cpu", **more)
        stated = {"sliding_window": True, "logits_soft_cap": True, "alibi": True}
        assert_same_as_torch(adapt_backend(styles.Backend, **stated), spec, **more)
    with pytest.raises(TypeError, match="windows"):
        adapt_backend(styles.Backend, windows=True)


def test_head_sizes_that_the_source_states() -> None:
    class Sized(styles.Backend):
        get_supported_head_sizes = staticmethod(lambda: [64, 128])

    with pytest.raises(UnsupportedConfigError, match="head_size"):
        attnlib.Attention(SPEC, backend=adapt_backend(Sized), device="cpu")


def test_the_impl_gets_vllm_arguments() -> None:
    backend = adapt_backend(styles.Backend, extra_impl_args={"own": 3}, kv_sharing=True)
    layer = attnlib.Attention(
        SPEC, backend=backend, scale=0.3, kv_sharing_target_layer_name="layers.0", device="cpu"
    )
    inner = layer.impl.inner
    assert type(inner) is styles.Impl and inner.extra == {"own": 3} and inner.shares
    assert inner.scale == 0.3 and inner.sizes == (4, 2, 32)


def test_a_registered_name_runs_and_is_selected() -> None:
    attnlib.register_backend("styled", adapt_backend(styles.Backend))
    try:
        with attnlib.use_backend("styled"):
            assert attnlib.get_attn_backend(SPEC, device="cpu").get_name() == "styled"
        assert_same_as_torch("styled")
        assert "styled" in str(attnlib.explain(SPEC, device="cpu"))
    finally:
        unregister_backend("styled")


def test_a_captured_step_runs_over_the_buffers() -> None:
    """The builder gets the buffers, and metadata of any class reach the impl."""
    backend = adapt_backend(styles.Backend)
    limits = attnlib.BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=32)
    layer = attnlib.Attention(SPEC, backend=backend, device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 8, "cpu")
    state = attnlib.AttentionState(backend.make_builder(SPEC, "cpu", limits=limits), limits)
    captured = state.graph_capture_get_metadata_for_batch(4)
    assert type(captured.built) is styles.Plan
    q, k, v = tokens(12)
    layer(q, k, v, cache, backend.make_builder(SPEC, "cpu").build(0, common_of([5, 7], [5, 7])))
    q, k, v = tokens(4)
    padded = state.builder.build(0, state.begin_forward(common_of([1, 1], [6, 8]), 4))
    assert padded.seq_lens.data_ptr() == captured.seq_lens.data_ptr()
    replayed = layer(q, k, v, cache, padded)
    eager = backend.make_builder(SPEC, "cpu").build(0, common_of([1, 1], [6, 8]))
    torch.testing.assert_close(layer(q, k, v, cache, eager), replayed)
    assert not replayed[2:].any()


def test_an_adapted_class_is_pickled_by_its_source() -> None:
    backend = adapt_backend(styles.Backend, sliding_window=True)
    again = pickle.loads(pickle.dumps(backend))
    assert again.source is styles.Backend and again.capabilities == backend.capabilities


@pytest.mark.parametrize("source", [styles.Backend, styles.SizedBackend])
def test_registration_without_the_adapter_names_it(source: Any) -> None:
    class Derived(attnlib.AttentionBackend):
        get_name = staticmethod(lambda: "derived")

        @staticmethod
        def get_impl_cls() -> Any:
            impl = source.get_impl_cls()
            return impl if issubclass(impl, attnlib.AttentionImpl) else Layered

    class Layered(attnlib.AttentionImpl):
        forward = styles.Impl.forward

    with pytest.raises(RegistrationError, match="register .*adapt_backend"):
        attnlib.register_backend("derived", Derived)


def test_a_builder_of_a_runner_is_refused() -> None:
    class Runner(styles.Backend):
        get_builder_cls = staticmethod(lambda: RunnerBuilder)

    with pytest.raises(RegistrationError, match="v0 runner"):
        adapt_backend(Runner)


def test_a_cache_that_is_not_one_tensor_is_refused() -> None:
    views = (torch.zeros(8, BLOCK, KV_HEADS, SIZE) for _ in range(2))
    cache = attnlib.PagedKVCache.from_views(*views)
    backend = adapt_backend(styles.Backend)
    layer = attnlib.Attention(SPEC, backend=backend, device="cpu")
    metadata = backend.make_builder(SPEC, "cpu").build(0, common_of([5, 7], [5, 7]))
    with pytest.raises(ContractError, match="are not one tensor"):
        layer(*tokens(12), cache, metadata)


def test_a_shape_without_a_layout_is_refused() -> None:
    class Odd(styles.BlocksFirst):
        @staticmethod
        def get_kv_cache_stride_order() -> tuple[int, ...]:
            return (4, 3, 2, 1, 0)

    with pytest.raises(ContractError, match="which is none of NHD"):
        adapt_backend(Odd)
    with pytest.raises(ContractError, match="not a permutation: run it in attnlib.compat.vllm"):
        adapt_backend(styles.Packed)


def test_layers_of_a_model_share_one_class() -> None:
    assert adapt_backend(styles.Backend) is adapt_backend(styles.Backend)
    assert adapt_backend(styles.Backend, sliding_window=True) is not adapt_backend(styles.Backend)


def test_the_conformance_suite_runs_an_adapted_backend() -> None:
    """Caches that are one tensor, as those of most layouts in the suite."""
    checks = "W2,W3,N1,N2,N3,K3,K4,F2,F3,D2,O2,G1,G3"
    backend = adapt_backend(styles.BlocksFirst)
    report = attnlib.testing.run_conformance(backend, device="cpu", quick=True, only=checks)
    assert report.passed, str(report)
    assert report.count(Outcome.PASS) >= 60


def test_an_impl_of_attnlib_gets_metadata_of_any_class() -> None:
    """As a backend whose v1 builder builds a class of its own."""

    class Own(attnlib.AttentionImpl):
        def forward(
            self, query: Any, cache: Any, metadata: Any, output: Any, lse: Any = None
        ) -> None:
            assert type(metadata) is styles.Plan
            inner = styles.Impl(4, 32, self.scale, 2, None, None, "auto", None, "decoder", None)
            views = (cache.key_cache, cache.value_cache)
            output.copy_(inner.attend(query, None, None, *views, metadata.common))

    class Source(attnlib.AttentionBackend):
        get_name = staticmethod(lambda: "own")
        get_impl_cls = staticmethod(lambda: Own)
        get_builder_cls = staticmethod(lambda: styles.PlanBuilder)

    assert_same_as_torch(adapt_backend(Source))


def test_a_source_without_a_name_has_that_of_its_class() -> None:
    """`get_name` is not among the methods that the seed lists."""

    class Nameless(styles.Backend):
        get_name = staticmethod(attnlib.AttentionBackend.get_name)

    assert adapt_backend(Nameless).get_name() == "nameless"
