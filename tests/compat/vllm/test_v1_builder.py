"""vLLM's v1 builders in attnlib; tests/compat/seeds compares them with their original."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnlib
import attnlib.testing
from attnlib.backends.torch import TorchBackend
from attnlib.compat import vllm
from attnlib.compat.vllm import backend_utils as utils
from attnlib.compat.vllm.config import config_of, spec_of
from attnlib.spec import CudaGraphSupport
from attnlib.testing.outcome import Outcome
from tests.compat.vllm import styles
from tests.compat.vllm.styles import SPEC, common_of

LIMITS = attnlib.BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=32)


class Impl(attnlib.AttentionImpl):
    def forward(self, query: Any, cache: Any, metadata: Any, output: Any, lse: Any = None) -> None:
        """Writes nothing: these tests build metadata only."""


class Backend(attnlib.AttentionBackend):
    get_name = staticmethod(lambda: "planned")
    get_impl_cls = staticmethod(lambda: Impl)
    get_builder_cls = staticmethod(lambda: styles.PlanBuilder)


def test_a_builder_gets_the_arguments_of_vllm() -> None:
    """The spec, an object like a `vllm_config`, and a device; limits are attnlib's."""
    made: Any = Backend.make_builder(SPEC, "cpu", limits=LIMITS)
    assert made.kv_cache_spec is SPEC and made.spec is SPEC
    assert made.device == torch.device("cpu") and made.limits is LIMITS
    config = made.config_given
    assert config.model_config.get_num_attention_heads(None) == 4
    assert config.model_config.dtype is torch.float32 and config.cache_config.block_size == 16
    assert config.scheduler_config.max_num_seqs == 4 and config.model_config.max_model_len == 32
    of_vllm = SimpleNamespace(block_size=16, num_kv_heads=2, head_size=32)
    assert spec_of(of_vllm, config) == SPEC


def test_objects_that_are_given_reach_the_builder_themselves() -> None:
    kv_cache_spec = SimpleNamespace(
        block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    config = config_of(SPEC)
    made: Any = utils.make_builder(Backend, kv_cache_spec, config, "cpu", limits=LIMITS)
    assert made.kv_cache_spec is kv_cache_spec and made.config_given is config
    assert made.spec == SPEC and made.limits is LIMITS
    clone = attnlib.AttentionState(made, LIMITS).graph_clone(2).builder
    assert clone is not made and clone.kv_cache_spec is kv_cache_spec
    assert clone.config_given is config and clone.limits.max_num_reqs == 2


def test_settings_of_the_registration_may_have_the_config() -> None:
    config = object()
    name = "planned_with_config"
    attnlib.register_backend(name, Backend, config={"vllm_config": config, "own": 1})
    try:
        made: Any = attnlib.selection.load_backend(name).make_builder(SPEC, "cpu")
        assert made.config_given is config and made.config["own"] == 1
    finally:
        attnlib.selection.unregister_backend(name)


def test_the_batch_reaches_the_builder_as_it_was_made() -> None:
    starts, lens = torch.tensor([0, 2, 5, 5]), torch.tensor([2, 9, 77])
    batch = utils.CommonAttentionMetadata(
        starts, starts, lens, lens, lens, 2, 5, 3, torch.zeros(3, 1).int(), torch.arange(8).int()
    )
    made = styles.PlanBuilder(SPEC, None, torch.device("cpu"))
    assert made.build(common_prefix_len=0, common_attn_metadata=batch).common is batch
    assert made.build_for_cudagraph_capture(batch).common is batch
    assert batch.query_start_loc is starts and batch.max_seq_len == 9
    assert batch.slot_mapping.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_builders_of_attnlib_read_such_a_batch() -> None:
    """int64 starts, int32 slots, rows past the batch: the same metadata as of exact tensors."""
    exact = common_of([2, 3], [2, 9])
    pad = torch.tensor([99, 99])
    batch = utils.CommonAttentionMetadata(
        torch.cat([exact.query_start_loc.long(), pad]),
        torch.cat([exact.query_start_loc.long(), pad]),
        torch.cat([exact.seq_lens.long(), pad]),
        torch.cat([exact.seq_lens.long(), pad]),
        torch.cat([exact.num_computed_tokens_cpu, pad]),
        2, 5, 3,
        torch.cat([exact.block_table_tensor, torch.full((2, 2), 99)]),
        torch.cat([exact.slot_mapping.int(), pad.int()]),
    )  # fmt: skip
    for name in ("torch", "triton"):
        builder = attnlib.selection.load_backend(name).make_builder(SPEC, "cpu", limits=None)
        ours, theirs = builder.build(0, batch), builder.build(0, exact)
        for field in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
            one, other = getattr(ours, field), getattr(theirs, field)
            assert one.dtype == other.dtype and torch.equal(one, other), field
        assert ours.num_prefill_tokens == theirs.num_prefill_tokens
    state = attnlib.AttentionState(
        attnlib.selection.load_backend("torch").make_builder(SPEC, "cpu", limits=LIMITS), LIMITS
    )
    decodes = utils.CommonAttentionMetadata(
        *(torch.tensor([0, 1, 2, 2]),) * 2, *(torch.tensor([6, 8, 0]),) * 3, 2, 2, 1,
        torch.tensor([[3, 1], [6, 0], [9, 9]]), torch.tensor([53, 103, 7]),
    )  # fmt: skip
    padded = state.begin_forward(decodes, 4)
    assert padded.seq_lens.tolist() == [6, 8, 0, 0]
    assert padded.slot_mapping.tolist() == [53, 103, -1, -1]


def test_wrong_values_of_such_a_batch_are_refused_where_attnlib_reads_it() -> None:
    starts, lens = torch.tensor([0, 2]), torch.tensor([2])
    batch = utils.CommonAttentionMetadata(
        starts, starts, lens, lens, lens, 1, 2, 1, torch.zeros(1, 1), torch.arange(2)
    )
    builder = attnlib.selection.load_backend("torch").make_builder(SPEC, "cpu")
    with pytest.raises(attnlib.errors.ContractError, match="max_query_len=1 is below"):
        builder.build(0, batch)


def test_full_cudagraphs_are_a_level_of_support() -> None:
    assert styles.PlanBuilder.cudagraph_support is CudaGraphSupport.ALWAYS

    class Eager(utils.AttentionMetadataBuilder[Any]):
        def build(self, *given: Any, **named: Any) -> Any: ...

    assert Eager.cudagraph_support is CudaGraphSupport.NEVER
    builder = Eager.create(SPEC, "cpu", limits=LIMITS)
    with pytest.raises(attnlib.errors.ContractError, match="cudagraph_support=NEVER"):
        attnlib.AttentionState(builder, LIMITS).graph_capture_get_metadata_for_batch(1)


def test_a_build_with_keywords_only_takes_positions_of_attnlib() -> None:
    batch = common_of([1, 1], [6, 8])
    builder = Backend.make_builder(SPEC, "cpu")
    assert builder.build(0, batch).common is batch
    assert builder.build(0, batch, True).common is batch
    assert builder.build_for_drafting(batch, 1).common is batch


def test_metadata_with_a_post_init_of_their_own_run_in_a_layer() -> None:
    """One that does not call that of its base class, as of classes written for vLLM."""

    @dataclasses.dataclass
    class Own(vllm.AttentionMetadata):
        common: Any

        def __post_init__(self) -> None:
            self.total = self.num_prefill_tokens + self.num_decode_tokens

    class Builder(utils.AttentionMetadataBuilder[Own]):
        def build(self, prefix: int, common: Any, fast: bool = False) -> Own:
            return Own(2, common.num_actual_tokens, 0, common.slot_mapping, None, False, common)

    class Writes(attnlib.AttentionImpl):
        def forward(
            self, query: Any, cache: Any, metadata: Any, output: Any, lse: Any = None
        ) -> None:
            output.fill_(metadata.total)

    class Source(Backend):
        capabilities = TorchBackend.capabilities
        get_impl_cls = staticmethod(lambda: Writes)
        get_builder_cls = staticmethod(lambda: Builder)
        get_metadata_cls = staticmethod(lambda: Own)

    layer = attnlib.Attention(SPEC, backend=Source, device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 8, "cpu")
    built = Source.make_builder(SPEC, "cpu").build(0, common_of([5, 7], [5, 7]))
    q, k, v = styles.tokens(12)
    assert (layer(q, k, v, cache, built) == 12).all()
    assert torch.equal(cache.key_cache[3, :5], k[:5])


def test_metadata_that_a_layer_of_attnlib_cannot_read() -> None:
    layer = vllm.Attention(4, 32, 0.2, 2, attn_backend=TorchBackend)
    layer.kv_cache = [torch.zeros(2, 8, 16, 2, 32)]
    with (
        vllm.set_forward_context(styles.Plan(None)),
        pytest.raises(attnlib.errors.ContractError, match=r"is a Plan; .*adapt_backend"),
    ):
        layer(*(x.flatten(1) for x in styles.tokens(2)))


@dataclasses.dataclass
class Batch(vllm.AttentionMetadata):
    common: Any


class BatchBuilder(utils.AttentionMetadataBuilder[Batch]):
    full_cudagraph_supported = True

    def __init__(self, kv_cache_spec: Any, vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec = kv_cache_spec

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Batch:
        common = common_attn_metadata
        counts = (common.num_reqs, common.num_actual_tokens, 0)
        return Batch(*counts, common.slot_mapping, None, False, common)


class GatherImpl(attnlib.AttentionImpl):
    def forward(self, query: Any, cache: Any, metadata: Any, output: Any, lse: Any = None) -> None:
        sizes = (self.spec.num_heads, self.spec.head_size, self.scale, self.spec.num_kv_heads)
        inner = styles.Impl(*sizes, None, None, "auto", None, "decoder", None)
        views = (cache.key_cache, cache.value_cache)
        found = inner.attend(query, None, None, *views, metadata.common)
        output.zero_()
        output[: len(found)] = found


class Gathering(attnlib.AttentionBackend):
    """A backend of attnlib whose builder is one of vLLM v1."""

    capabilities = dataclasses.replace(
        vllm.adapt_backend(styles.Backend).capabilities, kv_cache_layouts=("ANY",)
    )
    get_name = staticmethod(lambda: "gathering")
    get_impl_cls = staticmethod(lambda: GatherImpl)
    get_builder_cls = staticmethod(lambda: BatchBuilder)
    get_metadata_cls = staticmethod(lambda: Batch)


@pytest.fixture
def gathering() -> Iterator[str]:
    attnlib.register_backend("gathering", Gathering)
    yield "gathering"
    attnlib.selection.unregister_backend("gathering")


@pytest.mark.parametrize("name", ["{}", "prefill:{},decode:torch", "prefill:torch,decode:{}"])
def test_a_registered_backend_with_a_v1_builder_conforms(name: str, gathering: str) -> None:
    """Its batches are built, split between backends, padded, captured and replayed."""
    report = attnlib.testing.run_conformance(
        name.format(gathering), device="cpu", quick=True, only="W2,W3,N1,N2,N3,K2,K4,F2,F3,G1,G3,O2"
    )
    assert report.passed, str(report)
    assert report.count(Outcome.PASS) >= 50


def test_a_registered_backend_with_a_v1_builder_is_warmed_up(gathering: str) -> None:
    layer = attnlib.Attention(SPEC, backend=gathering, device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    assert attnlib.warmup(layer, cache, LIMITS).batches
