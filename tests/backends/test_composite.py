"""C1: composites of two backends over one cache; they pass the conformance suite."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from typing import Any, ClassVar

import pytest
import torch

import attnlib
from attnlib.backends import composite
from attnlib.backends.composite import make_composite
from attnlib.backends.loading import configured
from attnlib.backends.torch import TorchBackend
from attnlib.backends.torch.impl import TorchImpl
from attnlib.backends.torch.metadata import TorchMetadataBuilder
from attnlib.backends.triton import TritonBackend
from attnlib.capabilities import NOT_STATED, Capabilities, Sizes
from attnlib.device import resolve_device
from attnlib.errors import ContractError, LayoutMismatchError
from attnlib.metadata.state import AttentionState
from attnlib.selection import unregister_backend
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.testing.conformance import run_conformance
from attnlib.workspace import BatchLimits
from tests.testing.toy_backend import ToyBackend, ToyBuilder, toy_with

SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=4, needs_lse=True
)


def _child(
    name: str,
    threshold: int | None = 1,
    level: CudaGraphSupport = CudaGraphSupport.ALWAYS,
    **capabilities_changed: Any,
) -> type[TorchBackend]:
    """The torch backend under another name; it records query lengths, writes and captures."""

    class Impl(TorchImpl):
        def write_kv(self, *args: Any) -> None:
            Child.writes += 1
            super().write_kv(*args)

        def forward(
            self, query: Any, cache: Any, metadata: Any, output: Any, lse: Any = None
        ) -> None:
            Child.seen.append(
                (metadata.query_start_loc[1:] - metadata.query_start_loc[:-1]).tolist()
            )
            super().forward(query, cache, metadata, output, lse)

    class Builder(TorchMetadataBuilder):
        cudagraph_support = level
        reorder_batch_threshold = threshold

        def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
            Child.captures += 1
            return super().build_for_cudagraph_capture(common_attn_metadata)

    class Child(TorchBackend):
        capabilities = dataclasses.replace(
            TorchBackend.capabilities, **{"cudagraph": level, **capabilities_changed}
        )
        seen: ClassVar[list[list[int]]] = []
        writes: ClassVar[int] = 0
        captures: ClassVar[int] = 0

        @staticmethod
        def get_name() -> str:
            return name

        @staticmethod
        def get_impl_cls() -> Any:
            return Impl

        @staticmethod
        def get_builder_cls() -> Any:
            return Builder

    return Child


def _run(
    backend: type, queries: list[int], sequences: list[int], padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    generator = torch.Generator().manual_seed(1)
    cache = attnlib.PagedKVCache.allocate(SPEC, 64, "cpu")
    for view in (cache.key_cache, cache.value_cache):
        view.copy_(torch.randn(view.shape, generator=generator))
    blocks = itertools.count(1)
    table = [[next(blocks) for _ in range(-(-length // 4))] for length in sequences]
    common = attnlib.CommonAttentionMetadata.from_lengths(queries, sequences, table, 4, "cpu")
    tokens = sum(queries) + padding
    q, k, v = (torch.randn(tokens, heads, 16, generator=generator) for heads in (4, 2, 2))
    step = backend.make_builder(SPEC, "cpu").build(0, common)
    out, lse = attnlib.Attention(SPEC, backend=backend, device="cpu")(
        q, k, v, cache, step, return_lse=True
    )
    return out, lse, step


@pytest.mark.parametrize(
    ("queries", "decoded", "prefilled"),
    [
        ([1, 1, 9, 5], [[1, 1]], [[9, 5]]),
        ([1, 1, 1], [[1, 1, 1]], []),
        ([9, 5], [], [[9, 5]]),
        ([1, 9, 1], [[1]], [[9, 1]]),
        ([0, 1, 9], [[0, 1]], [[9]]),
        ([0, 9, 1], [], [[0, 9, 1]]),
        ([], [], [[]]),
    ],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_each_child_computes_its_phase(
    queries: list[int], decoded: list, prefilled: list, padding: int
) -> None:
    """Equal to a single backend; padding rows are 0 (M6), one child writes the cache (P7)."""
    prefill, decode = _child("p"), _child("d")
    sequences = [query + 3 * index for index, query in enumerate(queries)]
    out, lse, step = _run(make_composite(prefill, decode), queries, sequences, padding)
    expected, expected_lse, _ = _run(TorchBackend, queries, sequences, padding)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
    assert (out[sum(queries) :] == 0).all()
    assert (decode.seen, prefill.seen) == (decoded, prefilled) and (
        prefill.writes,
        decode.writes,
    ) == (1, 0)
    assert step.num_decode_tokens + step.num_prefill_tokens == sum(
        queries
    ) and step.num_decodes + step.num_prefills == len(queries)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
def test_batches_of_as_many_tokens_have_parts_of_other_sizes() -> None:
    """M6, P7: launches of an earlier batch are not those of a part with fewer rows."""
    pytest.importorskip("triton")
    backend = make_composite(attnlib.get_attn_backend(SPEC, "triton", "cpu"), TorchBackend)
    layer = attnlib.Attention(SPEC, backend=backend, device="cpu")
    builder, cache = backend.make_builder(SPEC, "cpu"), attnlib.PagedKVCache.allocate(SPEC, 8)
    for queries in ([1, 1, 19, 19], [1] * 10 + [11, 19]):
        table = torch.zeros(len(queries), 5, dtype=torch.int32)
        common = attnlib.CommonAttentionMetadata.from_lengths(queries, queries, table, 4, "cpu")
        q, k, v = (torch.randn(40, heads, 16) for heads in (4, 2, 2))
        memory = torch.full((48, 4, 16), 7.0)
        layer(q, k, v, cache, builder.build(0, common), output=memory[:40])
        assert (memory[40:] == 7).all(), queries


def test_the_decode_child_decides_what_a_decode_is() -> None:
    """The reorder threshold of the decode child splits the batch."""
    prefill, decode = _child("p", threshold=1), _child("d", threshold=4)
    _run(make_composite(prefill, decode), [4, 2, 5], [4, 9, 5])
    assert decode.seen == [[4, 2]] and prefill.seen == [[5]]


def test_update_block_table_updates_both_children() -> None:
    """A child with its old blocks would attend to the keys of another layer group."""
    composite = make_composite(_child("p"), _child("d"))
    builder = composite.make_builder(SPEC, "cpu")
    for queries, sequences in (([1, 9], [3, 9]), ([1, 1], [3, 9]), ([7, 9], [7, 9])):
        table = [[5, 6, 7], [1, 2, 3]]
        common = attnlib.CommonAttentionMetadata.from_lengths(queries, sequences, table, 4, "cpu")
        other = attnlib.CommonAttentionMetadata.from_lengths(
            queries, sequences, [[9, 8, 4], [11, 12, 13]], 4, "cpu"
        )
        built, wanted = builder.build(0, common), builder.build(0, other)
        updated = builder.update_block_table(built, other.block_table_tensor, other.slot_mapping)
        for part in ("decode", "prefill"):
            actual, expected = getattr(updated, part), getattr(wanted, part)
            assert (actual is None) == (expected is None)
            if expected is not None:
                assert torch.equal(actual.block_table, expected.block_table)
                assert torch.equal(actual.slot_mapping, expected.slot_mapping)
        assert torch.equal(updated.block_table, other.block_table_tensor) and torch.equal(
            built.block_table, common.block_table_tensor
        )


def test_graphs_of_uniform_batches_belong_to_one_child() -> None:
    """G1: the lower level of both, at most UNIFORM_BATCH; builder and capabilities agree."""
    always, never = _child("a"), _child("n", level=CudaGraphSupport.NEVER)
    single = _child("s", level=CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    for prefill, decode, level in (
        (always, _child("b"), CudaGraphSupport.UNIFORM_BATCH),
        (always, single, CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        (never, always, CudaGraphSupport.NEVER),
    ):
        composite = make_composite(prefill, decode)
        assert (
            composite.capabilities.cudagraph
            is composite.get_builder_cls().cudagraph_support
            is level
        )
    prefill, decode = _child("p"), _child("d")
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=16, max_seq_len=32)
    builder = make_composite(prefill, decode).make_builder(SPEC, "cpu", limits=limits)
    state: AttentionState[Any] = AttentionState(builder, limits)
    assert state.graph_capture_get_metadata_for_batch(4).prefill is None
    assert state.graph_capture_get_metadata_for_batch(4, query_len=4).decode is None
    assert (decode.captures, prefill.captures) == (1, 1), "each child builds its capture"
    padded = state.begin_forward(
        attnlib.CommonAttentionMetadata.from_lengths([4], [9], [[1, 2, 3]], 4, "cpu"), 4, 4
    )
    assert builder.build(0, padded).decode is None, (
        "padding rows do not change which child computes a uniform batch"
    )


def test_lengths_unknown_to_the_host() -> None:
    """Without lengths on the host the batch is not split."""
    composite = make_composite(_child("p"), _child("d"))
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 9], [3, 9], [[5], [1, 2, 3]], 4, "cpu"
    )
    device_only = common.replace(
        query_start_loc_cpu=None, seq_lens_cpu=None, num_computed_tokens_cpu=None
    )
    built = composite.make_builder(SPEC, "cpu").build(0, device_only)
    assert built.decode is None and built.prefill.query_start_loc.tolist() == [0, 1, 10]


def test_capabilities_are_those_of_both() -> None:
    """What one child does not state, the composite does not state."""
    a = _child(
        "a", sink=False, kv_cache_layouts=("HND", "NHD"), min_capability=(8, 0), lse=NOT_STATED
    )
    b = _child(
        "b",
        logits_soft_cap=False,
        kv_cache_layouts=("NHD",),
        min_capability=(9, 0),
        needs_finite_cache=True,
    )
    declared: Capabilities = make_composite(a, b).capabilities
    assert (declared.sink, declared.logits_soft_cap, declared.alibi) == (False, False, True)
    assert (
        declared.kv_cache_layouts == ("NHD",)
        and declared.min_capability == (9, 0)
        and declared.needs_finite_cache
    )
    assert declared.lse is NOT_STATED


def test_sizes_are_validated_by_both() -> None:
    """Sets of sizes cannot be intersected in general; the reasons name the child."""
    a, b = (
        _child("a", block_sizes=Sizes(256, None, 256)),
        _child("b", head_sizes=Sizes(exactly=(128,))),
    )
    reasons = make_composite(a, b).validate_configuration(SPEC, "cpu")
    assert "a: block_size=4 not supported (supported: multiples of 256 from 256 up)" in reasons
    assert "b: head_size=16 not supported (supported: 128)" in reasons
    assert make_composite(_child("c"), _child("d")).validate_configuration(SPEC, "cpu") == []


def test_identity_and_layout_mismatch() -> None:
    """Equal arguments return one class; children without a common layout are refused."""
    a, b = _child("a"), _child("b", kv_cache_layouts=("HND",))
    assert make_composite(a, a) is a
    assert make_composite(a, b) is make_composite(a, b) and make_composite(
        a, b
    ) is not make_composite(b, a)
    with pytest.raises(LayoutMismatchError, match="b reads HND; c reads NHD"):
        make_composite(b, _child("c", kv_cache_layouts=("NHD",)))


class ToyBuilderWithDecodes(ToyBuilder):
    """The toy builder with decodes of up to 4 tokens."""

    reorder_batch_threshold = 4


@pytest.mark.slow
def test_conformance_by_name() -> None:
    """The conformance suite with graphs, for children that read lengths from the device."""
    attnlib.register_backend("suite_p", ToyBackend)
    attnlib.register_backend("suite_d", toy_with(builder=ToyBuilderWithDecodes))
    try:
        report = run_conformance(
            "prefill:suite_p,decode:suite_d", device="cpu", quick=True, against=[]
        )
    finally:
        for name in ("suite_p", "suite_d"):
            unregister_backend(name)
    assert report.passed, str(report)
    assert {"cudagraph:UNIFORM_SINGLE_TOKEN_DECODE", "cudagraph:UNIFORM_BATCH"} & set(
        report.coverage.exercised
    )


def test_conformance_detects_a_child_that_cannot_replay() -> None:
    """It reads lengths as they were when its metadata was built, as host copies of a GPU's are."""

    def frozen(name: str) -> type[TorchBackend]:
        child = _child(name, threshold=8)

        class Builder(child.get_builder_cls()):  # type: ignore[misc]
            def build(self, *args: Any, **kwargs: Any) -> Any:
                built = super().build(*args, **kwargs)
                built.seq_lens_cpu = built.seq_lens_cpu.clone()
                return built

        return type(name, (child,), {"get_builder_cls": staticmethod(lambda: Builder)})

    composite = make_composite(frozen("p"), frozen("d"))
    report = run_conformance(composite, device="cpu", quick=True, only="G1", against=[])
    assert not report.passed and "replay 0 of a step captured" in str(report)


def test_composites_that_nobody_uses_are_freed() -> None:
    """D27: pairs of configured classes do not stay in memory."""
    gc.collect()
    before = len(composite._composites)
    for index in range(50):
        make_composite(configured(TorchBackend, {"index": index}), TorchBackend)
    gc.collect()
    assert len(composite._composites) <= before + 1


def test_explain_names_the_kernels_of_each_phase() -> None:
    spec = SPEC.replace(num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    spec = spec.replace(head_size_v=128, block_size=16)
    composite = make_composite(TritonBackend, TorchBackend)
    assert composite.explain_lines(spec, resolve_device("sm_90")) == [
        "prefill: triton (Hopper kernel)",
        "decode:  torch",
    ]
    assert composite.explain_lines(spec, resolve_device("sm_80")) == [
        "prefill: triton (portable Triton kernels)",
        "decode:  torch",
    ]


def test_fields_of_the_children_cannot_be_assigned() -> None:
    """The children hold slices of the table: an assignment would change only the whole batch."""
    builder = make_composite(_child("p"), _child("d")).make_builder(SPEC, "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 9], [3, 9], [[5], [1, 2, 3]], 4, "cpu"
    )
    step = builder.build(0, common)
    for name in ("block_table", "seq_lens", "num_decodes"):
        with pytest.raises(ContractError, match=f"{name} of a CompositeMetadata cannot be assign"):
            setattr(step, name, getattr(step, name))
    assert common.slot_mapping is not None
    step.slot_mapping = common.slot_mapping.clone()


@pytest.mark.parametrize("change", ["impl.sinks", "layer.sinks", "impl.scale"])
def test_children_follow_the_layer(change: str) -> None:
    """M3, M4: sinks and scale that change after construction are those of both children."""
    spec = SPEC.replace(has_sink=True)
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 9], [3, 9], [[5], [1, 2, 3]], 4, "cpu"
    )
    tensors = [torch.randn(10, heads, 16) for heads in (4, 2, 2)]
    results = []
    for backend in (make_composite(_child("p"), _child("d")), TorchBackend):
        layer = attnlib.Attention(spec, backend=backend, device="cpu", sinks=torch.zeros(4))
        if change == "impl.scale":
            layer.impl.scale = 0.7
        else:
            owner = layer if change == "layer.sinks" else layer.impl
            owner.sinks = torch.arange(4.0)
        cache = attnlib.PagedKVCache.allocate(spec, 8, "cpu")
        step = backend.make_builder(spec, "cpu").build(0, common)
        results.append(layer(*tensors, cache, step))
    torch.testing.assert_close(results[0], results[1])


def test_strided_metadata_gives_the_result_of_contiguous_metadata() -> None:
    """D1: slots, lengths and tables of a mixed batch; a captured step cannot follow the copies."""
    backend = make_composite(_child("strides_a"), _child("strides_b"))
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 5], [6, 5], [[0, 2], [1, 4]], SPEC.block_size, "cpu"
    )
    strided = common.replace(
        **{
            name: torch.stack([getattr(common, name), getattr(common, name) + 9], -1)[..., 0]
            for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table_tensor")
        }
    )
    layer = attnlib.Attention(SPEC, backend=backend, device="cpu")
    builder = backend.make_builder(SPEC, "cpu")
    q, k, v = (torch.randn(6, heads, 16) for heads in (4, 2, 2))
    results = []
    for batch in (common, strided):
        cache = attnlib.PagedKVCache.allocate(SPEC, 5, "cpu")
        results.append((layer(q, k, v, cache, builder.build(0, batch)), cache.key_cache))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    assert builder.build(0, strided).slot_mapping.is_contiguous()
    with pytest.raises(ContractError, match="slot_mapping has strides .*captured step"):
        builder.build_for_cudagraph_capture(common.replace(slot_mapping=strided.slot_mapping))
