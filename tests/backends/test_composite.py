"""C1: a pair of backends is an ordinary member: each phase by its own, one cache, the same exam."""

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
from attnlib.capabilities import NOT_STATED, Capabilities, Sizes
from attnlib.errors import LayoutMismatchError
from attnlib.metadata.state import AttentionState
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.testing.conformance import run_conformance
from attnlib.workspace import BatchLimits
from tests.testing.toy_backend import ToyBackend, ToyBuilder, toy_with

SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=4, needs_lse=True
)


def _half(
    name: str,
    threshold: int | None = 1,
    level: CudaGraphSupport = CudaGraphSupport.ALWAYS,
    **capabilities_changed: Any,
) -> type[TorchBackend]:
    """The torch backend under another name; it notes the query lengths that reach it, and who writes."""

    class Impl(TorchImpl):
        def write_kv(self, *args: Any) -> None:
            Half.writes += 1
            super().write_kv(*args)

        def forward(
            self, query: Any, cache: Any, metadata: Any, output: Any, lse: Any = None
        ) -> None:
            Half.seen.append(
                (metadata.query_start_loc[1:] - metadata.query_start_loc[:-1]).tolist()
            )
            super().forward(query, cache, metadata, output, lse)

    class Builder(TorchMetadataBuilder):
        cudagraph_support = level
        reorder_batch_threshold = threshold

        def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
            Half.captures += 1
            return super().build_for_cudagraph_capture(common_attn_metadata)

    class Half(TorchBackend):
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

    return Half


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
def test_each_phase_goes_its_own_way(
    queries: list[int], decoded: list, prefilled: list, padding: int
) -> None:
    """Same numbers as one backend for both, padding rows 0 (M6), one writer (P7)."""
    prefill, decode = _half("p"), _half("d")
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


def test_the_decode_half_says_what_a_decode_is() -> None:
    prefill, decode = _half("p", threshold=1), _half("d", threshold=4)
    _run(make_composite(prefill, decode), [4, 2, 5], [4, 9, 5])
    assert decode.seen == [[4, 2]] and prefill.seen == [[5]]


def test_other_blocks_reach_both_halves() -> None:
    """`update_block_table` (layer groups of one shape): a child that kept its old blocks would attend to another layer's keys."""
    pair = make_composite(_half("p"), _half("d"))
    builder = pair.make_builder(SPEC, "cpu")
    for queries, sequences in (([1, 9], [3, 9]), ([1, 1], [3, 9]), ([7, 9], [7, 9])):
        table = [[5, 6, 7], [1, 2, 3]]
        common = attnlib.CommonAttentionMetadata.from_lengths(queries, sequences, table, 4, "cpu")
        other = attnlib.CommonAttentionMetadata.from_lengths(
            queries, sequences, [[9, 8, 4], [11, 12, 13]], 4, "cpu"
        )
        built, wanted = builder.build(0, common), builder.build(0, other)
        updated = builder.update_block_table(built, other.block_table_tensor, other.slot_mapping)
        for part in ("decode", "prefill"):
            mine, its = getattr(updated, part), getattr(wanted, part)
            assert (mine is None) == (its is None)
            if its is not None:
                assert torch.equal(mine.block_table, its.block_table) and torch.equal(
                    mine.slot_mapping, its.slot_mapping
                )
        assert torch.equal(updated.block_table, other.block_table_tensor) and torch.equal(
            built.block_table, common.block_table_tensor
        )


def test_a_graph_holds_uniform_batches_which_one_half_builds() -> None:
    """G1: the level is the lower one, at most UNIFORM_BATCH, and builder and card agree."""
    always, never = _half("a"), _half("n", level=CudaGraphSupport.NEVER)
    single = _half("s", level=CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    for prefill, decode, level in (
        (always, _half("b"), CudaGraphSupport.UNIFORM_BATCH),
        (always, single, CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        (never, always, CudaGraphSupport.NEVER),
    ):
        pair = make_composite(prefill, decode)
        assert pair.capabilities.cudagraph is pair.get_builder_cls().cudagraph_support is level
    prefill, decode = _half("p"), _half("d")
    builder = make_composite(prefill, decode).make_builder(SPEC, "cpu")
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=16, max_seq_len=32)
    state: AttentionState[Any] = AttentionState(builder, limits)
    assert state.graph_capture_get_metadata_for_batch(4).prefill is None
    assert state.graph_capture_get_metadata_for_batch(4, query_len=4).decode is None
    assert (decode.captures, prefill.captures) == (1, 1), "the children's own capture builds"
    padded = state.begin_forward(
        attnlib.CommonAttentionMetadata.from_lengths([4], [9], [[1, 2, 3]], 4, "cpu"), 4, 4
    )
    assert builder.build(0, padded).decode is None, (
        "padding rows do not move a uniform batch to the other half"
    )


def test_lengths_that_the_host_does_not_know_go_to_one_half() -> None:
    """A runner that keeps lengths on the device says 0 on the host: then nothing may be cut by them."""
    pair = make_composite(_half("p"), _half("d"))
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 9], [3, 9], [[5], [1, 2, 3]], 4, "cpu"
    )
    blind = common.replace(
        query_start_loc_cpu=torch.zeros(3, dtype=torch.int32),
        seq_lens_cpu=torch.zeros(2, dtype=torch.int32),
    )
    built = pair.make_builder(SPEC, "cpu").build(0, blind)
    assert built.decode is None and built.prefill.query_start_loc.tolist() == [0, 1, 10]


def test_it_can_what_both_can() -> None:
    a = _half(
        "a", sink=False, kv_cache_layouts=("HND", "NHD"), min_capability=(8, 0), lse=NOT_STATED
    )
    b = _half(
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
    assert declared.lse is NOT_STATED, "what one half does not state, the pair does not state"


def test_sets_of_sizes_are_asked_of_both() -> None:
    """They cannot be intersected in general, so each half is asked, and named."""
    a, b = (
        _half("a", block_sizes=Sizes(256, None, 256)),
        _half("b", head_sizes=Sizes(exactly=(128,))),
    )
    reasons = make_composite(a, b).validate_configuration(SPEC, "cpu")
    assert "a: block_size=4 not supported (supported: multiples of 256 from 256 up)" in reasons
    assert "b: head_size=16 not supported (supported: 128)" in reasons
    assert make_composite(_half("c"), _half("d")).validate_configuration(SPEC, "cpu") == []


def test_identity_and_refusal() -> None:
    a, b = _half("a"), _half("b", kv_cache_layouts=("HND",))
    assert make_composite(a, a) is a
    assert make_composite(a, b) is make_composite(a, b) and make_composite(
        a, b
    ) is not make_composite(b, a)
    with pytest.raises(LayoutMismatchError, match="b reads HND; c reads NHD"):
        make_composite(b, _half("c", kv_cache_layouts=("NHD",)))


class FrontDecodes(ToyBuilder):
    """The toy's builder with a decode part of up to 4 tokens."""

    reorder_batch_threshold = 4


def test_a_pair_sits_the_exam_by_its_name() -> None:
    """Taste 17: the same kit as everybody, graphs included; halves that read lengths from the device replay rightly as a pair."""
    attnlib.register_backend("exam_p", ToyBackend)
    attnlib.register_backend("exam_d", toy_with(builder=FrontDecodes))
    try:
        report = run_conformance(
            "prefill:exam_p,decode:exam_d", device="cpu", quick=True, against=[]
        )
    finally:
        for name in ("exam_p", "exam_d"):
            attnlib.unregister_backend(name)
    assert report.passed, str(report)
    assert {"cudagraph:UNIFORM_SINGLE_TOKEN_DECODE", "cudagraph:UNIFORM_BATCH"} & set(
        report.coverage.exercised
    )


def test_the_exam_sees_a_half_that_cannot_replay() -> None:
    """The torch impl plans with lengths on the host, so a half that declares graphs over it is wrong, in a pair as alone."""
    pair = make_composite(_half("p", threshold=8), _half("d", threshold=8))
    report = run_conformance(pair, device="cpu", quick=True, only="G1", against=[])
    assert not report.passed and "replay 0 of a step captured" in str(report)


def test_composites_that_nobody_uses_are_freed() -> None:
    """D27: pairs of configured classes do not stay in memory."""
    gc.collect()
    before = len(composite._composites)
    for index in range(50):
        make_composite(configured(TorchBackend, {"index": index}), TorchBackend)
    gc.collect()
    assert len(composite._composites) <= before + 1
