"""Step plans of the `triton` backend under the interpreter."""

from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.triton.plan import TritonPlan
from attnlib.errors import ContractError
from attnlib.metadata.graph_guard import GraphGuard

pytest.importorskip("triton")

SPEC = attnlib.AttentionSpec(
    num_heads=2, num_kv_heads=1, head_size=16, dtype=torch.float32, block_size=16
)


def _step(backend: str, seq_lens: list[int]):
    torch.manual_seed(0)
    layer = attnlib.Attention(SPEC, backend=backend, device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 64, "cpu")
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    table = torch.randperm(64, dtype=torch.int32)[: len(seq_lens) * 16].view(len(seq_lens), 16)
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1] * len(seq_lens), seq_lens, table, 16, "cpu"
    )
    return layer, cache, common


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
def test_a_split_decode_accepts_more_rows_than_tokens() -> None:
    """M6: the workspace of the batch is too small for padded rows; the plan has its own."""
    outs = []
    for backend in ("torch", "triton"):
        layer, cache, common = _step(backend, [200, 250])
        step = layer.backend.make_builder(SPEC, "cpu").build(0, common)
        q, k, v = (torch.randn(9, heads, 16) for heads in (2, 1, 1))
        outs.append(layer(q, k, v, cache, step))
    assert step.decode_schedule.num_splits > 1
    torch.testing.assert_close(outs[0], outs[1])
    assert not outs[1][2:].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
def test_strided_metadata_is_read_by_its_strides() -> None:
    """Lengths, starts, slots and tables with strides give the result of contiguous ones."""
    results = []
    for strided in (False, True):
        layer, cache, common = _step("triton", [40, 33, 7])
        if strided:
            for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table_tensor"):
                tensor = getattr(common, name)
                setattr(common, name, torch.stack([tensor, tensor + 1], -1)[..., 0])
        step = layer.backend.make_builder(SPEC, "cpu").build(0, common)
        q, k, v = (torch.randn(3, heads, 16) for heads in (2, 1, 1))
        results.append((layer(q, k, v, cache, step), cache.key_cache))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
def test_strided_metadata_of_a_captured_step_is_refused() -> None:
    layer, _, common = _step("triton", [40, 33, 7])
    lens = common.seq_lens
    common.seq_lens = torch.stack([lens, lens + 1], -1)[..., 0]
    builder = layer.backend.make_builder(SPEC, "cpu")
    with pytest.raises(ContractError, match="a captured step needs it contiguous"):
        builder.build_for_cudagraph_capture(common)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize(
    ("longest", "batches", "num_splits"),
    [
        (256, [([1, 1, 13], [40, 33, 20]), ([12, 2, 1], [12, 200, 17])], 1),
        (9000, [([2, 13], [40, 20]), ([13, 2], [256, 17]), ([8, 7], [8, 7])], 2),
    ],
)
def test_a_captured_mixed_batch_serves_other_lengths(
    longest: int, batches: list[tuple[list[int], list[int]]], num_splits: int
) -> None:
    """The metadata of the capture reads only tensors of the batch, so it follows their values; how
    many programs share the keys follows from the bounds of the capture."""
    table = torch.arange(48, dtype=torch.int32).view(3, 16)[: len(batches[0][0])]

    def batch(query_lens: list[int], seq_lens: list[int]) -> attnlib.CommonAttentionMetadata:
        return attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, table, 16, "cpu", max_query_len=13, max_seq_len=longest
        )

    limits = attnlib.BatchLimits(max_num_reqs=3, max_num_tokens=15, max_seq_len=longest)
    layer = attnlib.Attention(SPEC, backend="triton", device="cpu")
    builder = layer.backend.make_builder(SPEC, "cpu", limits=limits)
    buffers = batch(*batches[0])
    captured = builder.build_for_cudagraph_capture(buffers)
    guard = GraphGuard(captured, include_cpu=True)
    reference = attnlib.Attention(SPEC, backend="torch", device="cpu")
    for query_lens, seq_lens in batches:
        now = batch(query_lens, seq_lens)
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            getattr(buffers, name).copy_(getattr(now, name))
        guard.check(builder.build_for_cudagraph_capture(buffers))
        guard.check(builder.build(0, buffers.replace(query_start_loc_cpu=now.query_start_loc_cpu)))
        torch.manual_seed(0)
        cache, expected = (attnlib.PagedKVCache.allocate(SPEC, 48, "cpu") for _ in range(2))
        cache.key_cache.normal_()
        cache.value_cache.normal_()
        expected.key_cache.copy_(cache.key_cache)
        expected.value_cache.copy_(cache.value_cache)
        q, k, v = (torch.randn(15, heads, 16) for heads in (2, 1, 1))
        step = reference.backend.make_builder(SPEC, "cpu").build(0, now)
        torch.testing.assert_close(
            layer(q, k, v, cache, captured), reference(q, k, v, expected, step)
        )
    (plan,) = _plans(captured)
    assert plan._launches.prefill.attend._grid[2] == num_splits


def _plans(metadata: Any) -> list[TritonPlan]:
    """The plans of a batch."""
    found = (plan for plan, _ in metadata.plans.values())
    return [plan for plan in found if isinstance(plan, TritonPlan)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize("has_limits", [True, False])
def test_layers_of_a_step_share_the_results_of_divided_prefills(has_limits: bool) -> None:
    """M7: a step allocates them once, with limits never."""
    limits = attnlib.BatchLimits(max_num_reqs=2, max_num_tokens=32, max_seq_len=9000)
    outs, spaces = [], set()
    for backend in ("torch", "triton"):
        layer, cache, _ = _step(backend, [60, 250])
        table = torch.arange(32, dtype=torch.int32).view(2, 16)
        builder = layer.backend.make_builder(SPEC, "cpu", limits=limits if has_limits else None)
        for query_lens in ([9, 12], [16, 11], [9, 12]):
            common = attnlib.CommonAttentionMetadata.from_lengths(
                query_lens, [60, 250], table, 16, "cpu", max_seq_len=9000
            )
            step = builder.build(0, common)
            for other in (layer, attnlib.Attention(SPEC, backend=backend, device="cpu")):
                q, k, v = (torch.randn(sum(query_lens), heads, 16) for heads in (2, 1, 1))
                outs.append(other(q, k, v, cache, step))
            if backend == "triton":
                (plan,) = _plans(step)
                space = plan._batch.prefills.workspace
                assert space.nbytes >= plan._launches.prefill.workspace_bytes > 0
                assert (step.workspace is space) == has_limits
                spaces.add(space.data_ptr())
    for expected, found in zip(outs[:6], outs[6:], strict=True):
        torch.testing.assert_close(found, expected)
    assert len(spaces) == 1 or not has_limits


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize("query_lens", [[1, 23], [2, 2, 20]])
def test_a_mixed_batch_after_an_unsplit_one_of_as_many_tokens(query_lens: list[int]) -> None:
    """The part of a mixed batch has fewer rows than a whole batch whose call looks the same."""
    layer, cache, _ = _step("triton", [24])
    table = torch.arange(48, dtype=torch.int32).view(3, 16)
    builder = layer.backend.make_builder(SPEC, "cpu")
    for lengths in ([24], query_lens):
        rows = table[: len(lengths)]
        common = attnlib.CommonAttentionMetadata.from_lengths(lengths, lengths, rows, 16, "cpu")
        q, k, v = (torch.randn(24, heads, 16) for heads in (2, 1, 1))
        memory = torch.full((32, 2, 16), 7.0)
        layer(q, k, v, cache, builder.build(0, common), output=memory[:24])
        assert (memory[24:] == 7).all(), lengths
